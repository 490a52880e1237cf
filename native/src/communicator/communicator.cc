// What a user posts on a communicator, and its clock. How operations run is in operations.cc, votes are in vote.cc, decisions in decide.cc,
// agree and shrink in agree.cc.
#include "communicator/communicator.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/overlap.h"
#include "collectives/results.h"
#include "communicator/agree.h"
#include "communicator/announce.h"
#include "communicator/checkpoints.h"
#include "communicator/lost_logs.h"
#include "communicator/restore.h"
#include "communicator/vote_tree.h"

namespace ftcomm {

namespace {

std::vector<int> ranks_of_slots(const std::vector<int>& members, std::size_t slots) {
    std::vector<int> ranks(slots, -1);
    for (std::size_t r = 0; r < members.size(); ++r) ranks[static_cast<std::size_t>(members[r])] = static_cast<int>(r);
    return ranks;
}

}  // namespace

Communicator::Communicator(Core& core, CommSpec spec, bool claimed)
    : core_(core),
      spec_(std::move(spec)),
      claimed_(claimed),
      rank_of_slot_(ranks_of_slots(spec_.members, core.view.members.size())),
      rank_(rank_of_slot(core.self())),
      p2p_(core, spec_, rank_),
      calls_(core, spec_),
      board_(core.boards),
      posts_(board_, core.shared),
      ways_(core, spec_, rank_, calls_, decision_, board_),
      announcements_(std::make_unique<Announcements>(*this)),
      vote_tree_(std::make_unique<VoteTree>(*this)),
      agreeing_(std::make_unique<Agreeing>(*this)) {
    FT_CHECK(rank_ >= 0, "communicator %s does not contain this rank", spec_.name.c_str());
    for (int m : spec_.members) {
        const auto& state = core_.view.members[static_cast<std::size_t>(m)];
        incarnations_.push_back(m == core_.self() ? core_.config.incarnation : state.incarnation);
    }
    decision_.alive = RankSet::first(static_cast<int>(spec_.members.size()));
    if (spec_.policy == Policy::Replay) begin_replay();
    FT_POINT("comm.create");
}

Communicator::~Communicator() = default;

void Communicator::claim(const CommSpec& spec) {
    claimed_ = true;
    spec_.name = spec.name;
    if (spec.timeout > 0) spec_.timeout = spec.timeout;
}

RequestPtr Communicator::collective(const OpDesc& desc) {
    if (desc.kind == OpKind::Barrier && desc.count != 0) {  // it has no data, whatever a caller says
        auto without = desc;
        without.count = 0;
        return collective(without);
    }
    auto request = core_.fresh_request();
    if (replays()) checkpoints_->note_use();
    const bool again = calls_.is_last(desc);
    auto s = again ? Status{} : calls_.check(desc);
    if (s) s = check_overlap(desc, rank_, spec_.members.size());
    if (!s) {
        core_.finish(request, std::move(s));
        return request;
    }
    const Time timeout = desc.timeout > 0 ? desc.timeout : this->timeout();
    if (desc.algorithm == Algorithm::RingLogged) {
        Status s = dead_end();
        if (s && decision_.revoked) s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
        if (s) ring().post(request, desc, timeout);
        else core_.finish(request, std::move(s));
        return request;
    }
    if (!again) calls_.keep(desc);
    const bool alone = core_.solo && !replays();
    // Counted while this rank is alone, too: it names what is derived from this communicator, as it does on those who go on.
    const auto seq = next_seq_++;
    auto op = spare_op_ != nullptr ? std::move(spare_op_) : std::make_unique<OpState>();
    op->begin(seq, desc, calls_.shape(), calls_.grid(), rank_, calls_.signature_of(calls_.shape()), request);
    if (alone) {
        op->bring_in();
        op->make_room();
        run_alone(*op, static_cast<int>(spec_.members.size()), rank_, {}, true);
        op->outcome(rank_, RankSet::only(rank_), core_.view.epoch, &request->outcome);
        op->give();
        core_.finish(request, dead_end());
        return request;
    }
    if (at_dead_end()) {  // nobody will ever vote here again
        core_.finish(request, dead_end());
        return request;
    }
    op->timeout = timeout;
    op->deadline = core_.now + timeout;
    open_.push_back(std::move(op));
    pump();
    return request;
}

RequestPtr Communicator::send(const void* data, std::uint64_t bytes, int dst, std::int64_t tag) {
    auto request = core_.fresh_request();
    Status s = dead_end();
    if (s && decision_.revoked) s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
    if (s && (dst < 0 || dst >= static_cast<int>(spec_.members.size())))
        s = Status::error(Code::Invalid, "destination " + std::to_string(dst) + " is not a rank of communicator " + spec_.name);
    if (s && core_.solo && dst != rank_ && !replays())
        s = Status::error(Code::Unsupported, "this replacement is not admitted yet: no messages before its first join point");
    if (!s) {
        core_.finish(request, std::move(s));
    } else {
        if (replays()) {
            checkpoints_->note_use();
            pairs_->send(request, data, bytes, dst, tag, core_.now + timeout());
        } else {
            p2p_.send(request, data, bytes, dst, tag, core_.now + timeout());
        }
    }
    return request;
}

RequestPtr Communicator::recv(void* data, std::uint64_t bytes, int src, std::int64_t tag) {
    auto request = core_.fresh_request();
    Status s = dead_end();
    if (s && decision_.revoked) s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
    if (s && src >= static_cast<int>(spec_.members.size()))
        s = Status::error(Code::Invalid, "source " + std::to_string(src) + " is not a rank of communicator " + spec_.name);
    if (s && core_.solo && src != rank_ && !replays())
        s = Status::error(Code::Unsupported, "this replacement is not admitted yet: no messages before its first join point");
    if (!s) {
        core_.finish(request, std::move(s));
    } else {
        if (replays()) {
            checkpoints_->note_use();
            pairs_->recv(request, data, bytes, src, tag, core_.now + timeout());
        } else {
            p2p_.recv(request, data, bytes, src == kAnyOrFail || src >= 0 ? src : kAny, tag, core_.now + timeout());
        }
    }
    return request;
}

std::string Communicator::name_of(const OpState& op) const {
    return op.shape.text() + " #" + std::to_string(op.seq) + " of communicator " + spec_.name;
}

void Communicator::on_writable(int slot) {
    p2p_.on_writable(slot);
    if (replays()) for_pairs([&](LoggedPairs& pairs) { pairs.on_writable(slot); });
    if (run_ != nullptr && !frozen_) {
        run_->on_writable(slot);
        after_progress();
    }
}

void Communicator::on_tick() {
    p2p_.on_tick(core_.now);
    if (replays()) {
        for_pairs([&](LoggedPairs& pairs) { pairs.on_tick(core_.now); });
        checkpoints_->on_tick();
    }
    announcements_->on_tick();
    vote_tree_->on_tick();
    if (run_ != nullptr && !frozen_) {
        run_->on_tick();
        after_progress();
        core_.has_work |= run_ != nullptr && run_->has_work();
    }
    if (open_.empty()) return;
    auto& op = *open_.front();
    if (op.started && !op.timeout_proposed && core_.now > op.deadline) {
        op.timeout_proposed = true;
        core_.host.trace("timeout");
        propose(Code::Timeout, op.seq);
    }
    if (core_.now > std::max(op.deadline, patience_)) give_up_on_the_dead(Code::PeerFailure);
}

bool Communicator::fail_request(const RequestPtr& given, Code why) {
    const auto request = replays() ? checkpoints_->waited_for(given) : given;
    for (auto& op : open_) {
        if (op->request != request) continue;
        propose(why, op->seq);
        if (why == Code::Interrupted) give_up_on_the_dead(why);
        return true;
    }
    if (replays() && checkpoints_->fail(request, why)) return true;
    if (agreeing_->has(request)) return true;  // ends with the vote, never privately
    return p2p_.cancel(request) || (replays() && (pairs_->cancel(request) || (ring_ && ring_->fail(request, why))));
}

void Communicator::fail_everything(const Status& status) {
    if (restore_ != nullptr) restore_->fail(status);
    drop_run();
    helpers_.clear();
    while (!open_.empty()) finish_current(status);
    fail_messages(status);
    agreeing_->fail(status);
}

void Communicator::fail_messages(const Status& status) {
    p2p_.fail_all(status);
    if (!replays()) return;
    checkpoints_->fail_all(status);
    for_pairs([&](LoggedPairs& pairs) { pairs.fail_all(status); });
}

void Communicator::on_dead_end() { fail_everything(dead_end()); }

void Communicator::close() {
    closed_ = true;
    core_.unmarked.erase(spec_.id);
    const auto closed = Status::error(Code::Closed, "communicator " + spec_.name + " was closed");
    fail_messages(closed);
    if (!replays()) p2p_.forget_arrived();
    keep_apart();
}

RankSet Communicator::failed() const {
    RankSet all = RankSet::first(static_cast<int>(spec_.members.size()));
    RankSet out = all - in_view();
    for (int r : all.list())
        if (core_.left.has(slot_of(r))) out.add(r);
    return out;
}

// So that the first n of them stay what they were when the user looked.
const std::vector<int>& Communicator::failed_in_order() {
    auto now = failed();
    std::erase_if(known_failed_, [&](int r) { return !now.has(r); });
    for (int r : known_failed_) now.remove(r);
    for (int r : now.list()) known_failed_.push_back(r);
    return known_failed_;
}

void Communicator::ack_failed(int n) {
    const auto& all = failed_in_order();
    const auto known = n < 0 ? all.size() : std::min(all.size(), static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < known; ++i) acked_.add(all[i]);
    p2p_.on_failures(failed(), acked_, evidence());
}

RequestPtr Communicator::agree(AgreeKind kind, std::int64_t flag) { return agreeing_->post(kind, flag); }

bool Communicator::quiescent() const {
    return (open_.empty() || open_.front()->seq >= held_from_) && helpers_.empty() && !frozen_ &&
           (!agreeing_->is_open() || agreeing_->waits_for_admission());
}

bool Communicator::rests() const {
    return closed_ && !replays() && idle() && run_ == nullptr && !cell_reading_ && announcements_->idle();
}

bool Communicator::blocked_on(int slot) const {
    const int r = rank_of_slot(slot);
    if (r < 0 || !decision_.alive.has(r)) return false;
    return frozen_ || !open_.empty() || agreeing_->is_open() || p2p_.waits_for(r) || (replays() && pairs_->waits_for(r));
}

}  // namespace ftcomm
