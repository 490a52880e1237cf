// The last operation's result, for whoever turns out to lack it (C6): in the log, or, where nothing waits for the others to have it or to have
// logged it, in memory. There it lies until this rank begins the operation after the next, which shows that all have begun the next
// one, and so have the result.
#include "base/check.h"
#include "collectives/results.h"
#include "communicator/communicator.h"

namespace ftcomm {

void Communicator::keep_result(const OpState& op, const FlatRoom* room) {
    if constexpr (!kFaultTolerant) return;
    const bool flat = op.shape.algorithm == Algorithm::Flat && core_.rules.c6 && decision_.alive.count() > 1;
    if (replays() || (flat && room != nullptr)) {
        op.label_runs(&last_.labels);
        last_.desc = op.desc;
    }
    last_.logged = replays() && logged_ >= op.seq;
    if (!flat) return;
    if (room != nullptr) {
        FT_CHECK(room == &flat_rooms_[next_room_], "a result in another operation's memory");
        last_.flat = room;
        next_room_ = 1 - next_room_;
        if (room->room.size() > FlatRoom::kMuch) keep_apart();
    } else if (replays()) {  // it was handed out, and this rank's log has a share of it
        last_.keep(static_cast<const std::byte*>(op.desc.recv), spec_.members.size());
    }
}

bool Communicator::retains_result() const { return last_.is_in_memory() || (last_.logged && results_->is_whole(last_.seq)); }

void Communicator::keep_apart() {
    last_.keep_apart(spec_.members.size());
    if (run_ != nullptr) return;
    for (auto& flat : flat_rooms_)
        if (closed_ || flat.room.size() > FlatRoom::kMuch) flat = {};
}

void Communicator::keep_in_log() {
    last_.kept = std::make_shared<Bytes>(shared_bytes(last_.desc, spec_.members.size()));
    last_.desc.recv = last_.kept->data();
    last_.desc.send = nullptr;  // the caller's again
    OpState op(last_.seq, last_.desc, last_.shape, last_.grid, rank_, calls_.signature_of(last_.shape), nullptr);
    const auto s = results_->read(op);
    FT_CHECK(s.ok(), "result %llu is to be handed out: %s", static_cast<unsigned long long>(last_.seq), s.message.c_str());
}

// Results up to here can be had from this rank. Of those that it has logged, the last two may be shares of what others have not logged: it
// has returned from the last but one, which all had begun, having logged everything before that.
std::uint64_t Communicator::logged_whole() const {
    const auto lacks = [&](std::uint64_t seq) {
        return seq > 0 && !results_->is_whole(seq) && !(last_.seq == seq && retains_result());
    };
    if (logged_ > 1 && lacks(logged_ - 1)) return logged_ - 2;
    return lacks(logged_) ? logged_ - 1 : logged_;
}

}  // namespace ftcomm
