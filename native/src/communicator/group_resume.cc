// A log group goes on from one checkpoint (G2): what its members said to each other is in no log, so a member that goes on from a newer one
// than another would have said already what that one still waits for.
//
// Each tells the others which mark it can go on from, having loaded that checkpoint. When all say the same, that is it. Who has offered a
// newer one than somebody else is told to load an older one, and offers that; offers only go down. Nobody offers less than at first before it
// has seen another one offer less; so once a member has seen the same offer of all, nobody comes down any more. Offers of other
// processes of the slots are not among them: they were not in together (G1).
#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "communicator/checkpoints.h"

namespace ftcomm {

RankSet Communicator::Checkpoints::others_of_group() const {
    RankSet out;
    for (int r = 0; r < static_cast<int>(spec_.members.size()); ++r)
        if (r != rank_ && comm_.pairs_->is_direct(r)) out.add(r);
    return out;
}

void Communicator::Checkpoints::resume_with_group(RequestPtr request, std::uint64_t number, const ProgramPlace& here) {
    group_resume_ = GroupResume{std::move(request), number, here, core_.now + comm_.timeout()};
    for (int r : others_of_group().list()) offer_to(r);
    settle_group_resume();
}

// Who comes in has heard nothing yet.
void Communicator::Checkpoints::on_view() {
    for (int r : others_of_group().list()) offer_to(r);
}

void Communicator::Checkpoints::offer_to(int rank) {
    if (!group_resume_ || core_.solo || !comm_.in_view().has(rank)) return;
    auto h = FrameHeader{};
    h.kind = FrameKind::GroupResume;
    h.comm = spec_.id;
    h.seq = group_resume_->number;
    FT_POINT("unlogged.resume");
    core_.sender.send(spec_.members[static_cast<std::size_t>(rank)], h);
}

void Communicator::Checkpoints::on_offer(int rank, std::uint64_t number) {
    offers_[rank] = number;
    settle_group_resume();
}

void Communicator::Checkpoints::settle_group_resume() {
    if (!group_resume_ || group_resume_->request == nullptr) return;
    bool all = true;
    for (int r : others_of_group().list()) {
        const auto it = offers_.find(r);
        if (it != offers_.end() && it->second < group_resume_->number) {
            core_.host.trace("group.back");
            auto s =
                Status::error(Code::Mismatch, "rank " + std::to_string(r) +
                                                  " of this rank's log group can't go on from this "
                                                  "checkpoint, only from one before it: load the newest of checkpoints(), and "
                                                  "call resume again (resume_from does that)");
            s.ranks = {r};
            s.operation = "resume on communicator " + spec_.name;
            core_.finish(std::exchange(group_resume_->request, nullptr), std::move(s));
            return;
        }
        all = all && it != offers_.end() && it->second == group_resume_->number;
    }
    if (!all) return;
    core_.host.trace("group.resumed");
    end_group_resume(go_on_from(group_resume_->number, group_resume_->here));
}

void Communicator::Checkpoints::end_group_resume(Status status) {
    if (!group_resume_) return;
    const auto request = std::move(group_resume_->request);
    group_resume_.reset();
    if (request != nullptr) core_.finish(request, std::move(status));
}

void Communicator::Checkpoints::on_tick() {
    if (group_resume_ && group_resume_->request != nullptr && core_.now > group_resume_->deadline)
        end_group_resume(Status::error(Code::Timeout, "Timed out: not all of this rank's log group have come to resume"));
}

void Communicator::Checkpoints::postpone(Time deadline) {
    if (group_resume_) group_resume_->deadline = std::max(group_resume_->deadline, deadline);
}

bool Communicator::Checkpoints::fail(const RequestPtr& request, Code why) {
    if (!group_resume_ || group_resume_->request != request || request == nullptr) return false;
    end_group_resume(Status::error(why, "resume was given up"));
    return true;
}

void Communicator::Checkpoints::fail_all(const Status& status) { end_group_resume(status); }

}  // namespace ftcomm
