#include "communicator/announce.h"

#include "base/failpoint.h"
#include "communicator/agree.h"
#include "communicator/vote_tree.h"

namespace ftcomm {

namespace {

void announced(FrameKind kind) {
    if (kind == FrameKind::Decision) FT_POINT("decide.announce");
}

}  // namespace

void Communicator::Announcements::announce(const Bytes& record, FrameKind kind) {
    const auto self = RankSet::only(comm_.rank_);
    const auto waiting = comm_.voters() - self;
    spread_to(waiting, kind, record);
    for (int r : (comm_.in_view() - waiting - self).list()) {
        core_.tell(comm_.slot_of(r), comm_.control(kind), record);
        announced(kind);
    }
}

void Communicator::Announcements::spread_to(const RankSet& ranks, FrameKind kind, ByteView record) {
    RankSet slots;
    for (int r : ranks.list()) slots.add(comm_.slot_of(r));
    auto header = comm_.control(kind);
    header.aux = core_.view.epoch;
    core_.spread_record(header, record, slots, [kind] { announced(kind); });
}

void Communicator::Announcements::pass_on(const FrameHeader& header, const RankSet& slots, ByteView record) {
    if (core_.view.epoch < header.aux && core_.rules.m16) {  // also the last one of a tree, which has to have the view itself
        core_.host.trace("spread.held");
        records_.push_back({header, slots, Bytes(record.begin(), record.end())});
        return;
    }
    if (slots.empty()) return;
    core_.host.trace("spread.passed_on");
    RankSet left;
    for (int s : slots.list())
        if (const int r = comm_.rank_of_slot(s); r >= 0 && comm_.in_view().has(r)) left.add(s);
    core_.spread_record(header, record, left, [] { FT_POINT("spread.pass_on"); });
}

void Communicator::Announcements::answer(int rank, FrameKind kind) {
    if (comm_.record_.empty()) return;
    auto header = comm_.control(kind);
    header.attempt = comm_.attempt_;
    core_.tell(comm_.slot_of(rank), header, comm_.record_);
}

void Communicator::Announcements::send_votes(int to, FrameKind kind, const Bytes& votes) {
    auto header = comm_.control(kind);
    header.aux = core_.view.epoch;
    core_.sender.send_long(comm_.slot_of(to), header, comm_.spec_and(votes));
}

bool Communicator::Announcements::are_of_this_view(int from, FrameKind kind, std::uint64_t epoch, ByteView votes) {
    if (epoch == core_.view.epoch || !core_.rules.m17) return true;
    const bool agree = kind == FrameKind::AgreeVote;
    if (epoch > core_.view.epoch) {
        core_.host.trace(agree ? "agree.votes_held" : "votes.held");
        votes_.push_back({from, kind, epoch, Bytes(votes.begin(), votes.end())});
    } else {
        core_.host.trace(agree ? "agree.votes_outdated" : "votes.outdated");
        // Whoever was to pass it on may have ended; as may the sender of what was held.
        if (comm_.in_view().has(from)) core_.tell_view(comm_.slot_of(from));
    }
    return false;
}

void Communicator::Announcements::on_view() {
    std::vector<HeldRecord> records;
    records.swap(records_);
    for (const auto& h : records) pass_on(h.header, h.slots, h.record);
    std::vector<HeldVotes> votes;
    votes.swap(votes_);
    for (const auto& h : votes) {  // whoever sent them may have gone meanwhile: they are others' votes, too, and those are here
        if (h.kind == FrameKind::Votes) comm_.vote_tree_->on_votes(h.from, h.epoch, h.body);
        else comm_.agreeing_->on_votes(h.from, h.epoch, h.body);
    }
}

// For a whole tick: the view that they are from may have been lost on its way.
void Communicator::Announcements::on_tick() {
    if (!idle() && held_at_tick_) core_.wants_view = true;
    held_at_tick_ = !idle();
}

}  // namespace ftcomm
