// Records that one rank has for many: decisions, results of agree and shrink, and the call to vote. They go along a tree
// (channel/spread.h). What does not come through, because a rank on the way has died, is asked for: its death changes the view, all who
// wait vote again then, and whoever has the record answers a vote that comes too late with it.
#include "base/check.h"
#include "base/failpoint.h"
#include "communicator/communicator.h"

namespace ftcomm {

namespace {

void announced(FrameKind kind) {
    if (kind == FrameKind::Decision) FT_POINT("decide.announce");
}

}  // namespace

// To those who wait for it, in the tree: they have this communicator, for they have voted. Others in the view may not have made it yet.
void Communicator::announce(const Bytes& record, FrameKind kind) {
    const auto waiting = voters() - RankSet::only(rank_);
    spread_to(waiting, kind, record);
    for (int r : (in_view() - waiting - RankSet::only(rank_)).list()) {
        core_.tell(spec_.members[static_cast<std::size_t>(r)], control(kind), record);
        announced(kind);
    }
}

void Communicator::spread_to(const RankSet& ranks, FrameKind kind, ByteView record) {
    RankSet slots;
    for (int r : ranks.list()) slots.add(spec_.members[static_cast<std::size_t>(r)]);
    auto header = control(kind);
    header.aux = core_.view.epoch;
    core_.spread_record(header, record, slots, [kind] { announced(kind); });
}

// Whom the sender knows, this rank knows only once it has the same view: then it has links to all of them, or they are out.
void Communicator::pass_on(const FrameHeader& header, const RankSet& slots, ByteView record) {
    if (core_.view.epoch < header.aux && core_.rules.m16) {  // also the last one of a tree, which has to have the view itself
        core_.host.trace("spread.held");
        held_records_.push_back({header, slots, Bytes(record.begin(), record.end())});
        return;
    }
    if (slots.empty()) return;
    core_.host.trace("spread.passed_on");
    RankSet left;
    for (int s : slots.list())
        if (const int r = rank_of_slot(s); r >= 0 && core_.in_view(s, incarnations_[static_cast<std::size_t>(r)])) left.add(s);
    core_.spread_record(header, record, left, [] { FT_POINT("spread.pass_on"); });
}

void Communicator::pass_on_held() {
    std::vector<HeldRecord> held;
    held.swap(held_records_);
    for (const auto& h : held) pass_on(h.header, h.slots, h.record);
}

// To a vote that comes too late: its sender has missed it.
void Communicator::answer_with_record(int rank, FrameKind kind) {
    if (record_.empty()) return;
    auto header = control(kind);
    header.attempt = attempt_;
    core_.tell(spec_.members[static_cast<std::size_t>(rank)], header, record_);
}

}  // namespace ftcomm
