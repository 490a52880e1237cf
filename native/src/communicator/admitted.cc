// A communicator at a join point (M13): how it stands, what waits, and where all go on once replacements are in.
#include "base/check.h"
#include "collectives/records.h"
#include "communicator/agree.h"

namespace ftcomm {

// Without what waits for the admission itself: a vote that is repeated must say the same.
AdmitEntry Communicator::standing() const {
    return {spec_.id, attempt_, next_seq_ - open_.size(), decision_.agree_seq, decision_.revoked};
}

// M13: the newcomers know nothing of what was before; everyone goes on from the same attempt and operation number.
void Communicator::on_admitted(std::uint64_t nth, const AdmitEntry* entry, const RankSet& slots, const RankSet& alive) {
    RankSet came;
    for (std::size_t r = 0; r < spec_.members.size(); ++r) {
        if (!slots.has(spec_.members[r])) continue;
        incarnations_[r] = core_.view.members[static_cast<std::size_t>(spec_.members[r])].incarnation;
        in_view_epoch_.reset();
        came.add(static_cast<int>(r));
        agreeing_->on_replaced(static_cast<int>(r));
    }
    if (came.empty()) return;
    board_.forget();
    if (replays()) {
        on_returned(came);
        return;
    }
    auto others = came;
    others.remove(rank_);
    p2p_.replaced(others, failed(), acked_, evidence());
    since_ = nth;
    // Nobody had it when all voted: whoever has made it since has run nothing on it. What an admission before has said of it went with those who
    // had it, and what is decided without the newcomers meanwhile, but that it is revoked, counts for nobody (the record is outdated).
    const AdmitEntry anew{spec_.id, first_attempt(nth), 1, 0, false};
    if (entry == nullptr) {
        core_.host.trace("admission.anew");
        const bool revoked = decision_.revoked && !record_.empty();  // not what an admission before has said
        decision_ = {};
        decision_.revoked = revoked;
        entry = &anew;
    }
    FT_CHECK(open_.empty() || !open_.front()->started, "a replacement came in while %s was running",
             name_of(*open_.front()).c_str());
    frozen_ = false;
    freeze_sent_ = false;
    if (core_.rules.m13) {
        attempt_ = entry->attempt;
        done_seq_ = entry->next_seq - 1;
        next_seq_ = entry->next_seq;
        for (auto& op : open_) {  // what other threads posted meanwhile waits in line
            for (auto& p : proposals_)
                if (p.seq == op->seq) p.seq = next_seq_;
            op->seq = next_seq_++;
        }
        decision_.agree_seq = std::max(decision_.agree_seq, entry->agree_seq);
        // A revocation decided too late for the table is known to some only. It counts for nobody, and is wished for again.
        if (decision_.revoked && !entry->revoked) {
            core_.host.trace("admission.revoke_again");
            proposals_.push_back({Code::Revoked, 0});
        }
        decision_.revoked = entry->revoked;
        decision_.revoked_from = decision_.revoked ? entry->next_seq : ~std::uint64_t{0};
    }
    decision_.attempt = attempt_;
    decision_.alive = {};  // as recorded, not as this rank sees it now: later deaths are the next decision's business
    for (std::size_t r = 0; r < spec_.members.size(); ++r)
        if (alive.has(spec_.members[r])) decision_.alive.add(static_cast<int>(r));
    decision_.plans.clear();
    decision_.fail_from = ~std::uint64_t{0};
    decision_.cause = {};
    decision_.frames_only = decision_.no_windows = false;  // newcomers do not know of it, and find it out again
    last_ = {};
    unrun_.clear();
    // A hand-out whose last words have not come here: all have voted since, so all have what it was for.
    drop_run();
    helpers_.clear();
    acked_ = acked_ - came;
    ballot_.forget_through(attempt_);
    std::erase_if(stash_, [&](const Stashed& f) { return f.header.attempt < attempt_; });
    p2p_.on_failures(failed(), acked_, evidence());
}

void Communicator::resume() {
    if (!ahead_.empty()) {
        const Bytes record = std::move(ahead_);
        ahead_.clear();
        adopt(record);
    }
    agreeing_->resume();
    pump();
    look_again();
}

}  // namespace ftcomm
