#include "collectives/op_planner.h"

#include <algorithm>

#include "base/check.h"
#include "collectives/plan_runs.h"

namespace ftcomm {

std::optional<OpPlan> OpPlanner::plan(std::uint64_t seq, bool* fails_rest) {
    OpPlan p;
    p.seq = seq;
    if (const auto* before = in_.previous.plan_for(seq); before != nullptr && before->verdict == OpPlan::Verdict::Fail) {
        return *before;  // C5: late entrants fail as the others did
    }
    std::vector<Standing> standings;
    bool entered = false, complete = false, failed = false;
    RankSet passed, unrun;
    for (const auto& [rank, vote] : in_.votes) {
        Standing s;
        s.rank = rank;
        s.logged = vote.logged >= seq;
        for (const auto& o : vote.ops) {
            if (o.seq != seq) continue;
            s.op = &o;
            s.retained = o.retained;
            s.state = o.state == OpVote::State::Open       ? Standing::State::Open
                      : o.state == OpVote::State::Complete ? Standing::State::Complete
                                                           : Standing::State::Failed;
            if (!entered) p.shape = o.shape;
            entered = true;
            complete |= o.state == OpVote::State::Complete;
            failed |= o.state == OpVote::State::Failed;
        }
        if (s.op == nullptr && vote.unrun.has(seq))
            unrun.add(rank);  // it failed at once there: who runs it called something else
        // Its vote speaks of a later operation that it took part in and that has ended: this one it has returned from long ago.
        for (const auto& o : vote.ops)
            if (s.op == nullptr && !unrun.has(rank) && o.seq > seq && o.state != OpVote::State::Open) {
                s.state = Standing::State::Complete;
                complete = true;
            }
        if (s.op == nullptr && s.state == Standing::State::NotEntered && vote.done_seq >= seq) passed.add(rank);
        standings.push_back(s);
    }
    if (!entered) return std::nullopt;
    // Replay: who had returned from it is dead, but its replacement has the result. Segments of it may have been handed out: then
    // reducing the others again, not as it was done the first time, would give other bits.
    if (!complete && seq <= known_done_)
        for (const auto& s : standings) complete |= s.logged;
    if (complete) done_through_ = std::max(done_through_, seq);
    if (in_.spec.policy == Policy::Replay && fails_already(seq)) return std::nullopt;  // and nobody has its result
    if (failed) {
        // It failed at once everywhere it was entered (a dead root): the same for those who come later.
        p.verdict = OpPlan::Verdict::Fail;
        p.cause = peer_failure(in_.dead, in_.evidence, in_.epoch, advice_for(in_.spec.policy));
        return p;
    }
    if (!unrun.empty()) return fail(p, called_something_else(unrun, p.shape));  // whoever is through it cannot hand it to them
    if (complete && (in_.rules.c7 || in_.spec.policy != Policy::Raise || newly_dead_.empty())) {
        return finish_as_completed(p, standings);
    }
    // Nobody is through it in either way, since nobody has heard from all: it is begun again, from inputs that are as they were.
    const auto* mixed = passed.empty() ? mixed_exchange(standings) : nullptr;
    if (mixed != nullptr) p.shape = *mixed;
    else if (auto cause = disagreement(standings)) return fail(p, *cause);
    if (!passed.empty()) return fail(p, called_something_else(passed, p.shape));
    const auto given_up = proposed_failure(seq, standings, mixed != nullptr);
    if ((given_up || revoke_) && may_have_been_returned(p, standings)) {
        done_through_ = std::max(done_through_, seq);
        return finish_as_completed(p, standings);
    }
    if (given_up) return fail(p, *given_up);
    if (in_.spec.policy == Policy::Raise && !newly_dead_.empty()) {
        *fails_rest = true;
        return std::nullopt;
    }
    if (revoke_) return fail(p, revoked());
    // Replay: who has left comes back for nothing. A sum without it is no result of this program.
    if (in_.spec.policy == Policy::Replay && voters_.count() < static_cast<int>(in_.spec.members.size()))
        return fail(p, peer_failure(in_.dead, in_.evidence, in_.epoch, "it left before this operation"));
    return repair(p, standings);
}

OpPlan OpPlanner::fail(OpPlan p, Cause cause) {
    p.verdict = OpPlan::Verdict::Fail;
    p.cause = std::move(cause);
    return p;
}

Cause OpPlanner::called_something_else(const RankSet& ranks, const Shape& shape) const {
    Cause c;
    c.code = Code::Mismatch;
    c.epoch = in_.epoch;
    for (int r : ranks.list()) c.ranks.push_back(r);
    c.message = "ranks " + ranks.text() + " called a different operation at this point (it failed there at once) than " +
                shape.text() + ". Make every rank call the same collectives in the same order, with equal sizes and types";
    return c;
}

bool OpPlanner::fails_already(std::uint64_t seq) const {
    for (const auto& [rank, vote] : in_.votes) {
        if (seq >= vote.revoked_from) return true;
        for (const auto& f : vote.failures)
            if (f.seq == seq) return true;
    }
    return false;
}

bool OpPlanner::may_have_been_returned(const OpPlan& p, const std::vector<Standing>& standings) const {
    if (in_.spec.policy != Policy::Replay) return false;
    bool inherited = false, all = true;
    for (const auto& [rank, vote] : in_.votes) inherited |= vote.inherited >= p.seq;
    for (const auto& s : standings) all &= s.logged;
    return inherited && (all || p.shape.algorithm == Algorithm::Flat);
}

std::optional<OpPlan> OpPlanner::finish_as_completed(OpPlan p, const std::vector<Standing>& standings) {
    const Standing* holder = nullptr;
    const Standing* has_log = nullptr;
    bool all_have = true;
    const std::uint32_t n = p.shape.blocks * p.shape.per_block;
    for (const auto& s : standings) {
        if (s.state == Standing::State::Complete) {
            if (s.retained && holder == nullptr) holder = &s;
            continue;
        }
        if (s.logged) {
            if (has_log == nullptr) has_log = &s;
            continue;
        }
        if (p.shape.is_direct() || !p.shape.shares_finals()) continue;
        for (const auto& l : s.state == Standing::State::Open ? s.op->labels : std::vector<LabelRun>{{n, LabelKind::Input, {}}})
            all_have &= l.kind == LabelKind::Final;
    }
    if (all_have) {
        p.verdict = OpPlan::Verdict::Complete;
        return p;
    }
    if (in_.spec.policy == Policy::Replay && p.shape.algorithm == Algorithm::Flat && holder == nullptr && has_log == nullptr) {
        // Past it all the same: an error of the disk cost somebody its record. The one who asks for it is told so by the log.
        for (const auto& s : standings)
            if (s.state == Standing::State::Complete) return std::nullopt;
        // No fence: those who had it are gone, and not all had logged their share. Nobody is past it, so it is done again, or handed
        // out by who was handed it: the same bits either way (L7).
        p.settled = true;
        return repair(std::move(p), standings);
    }
    FT_CHECK(holder != nullptr || has_log != nullptr,
             "operation %llu was completed by a rank, another lacks data, and nobody kept the result",
             static_cast<unsigned long long>(p.seq));
    p.verdict = OpPlan::Verdict::Repair;
    p.settled = true;
    if (holder == nullptr) {
        const auto size = static_cast<int>(in_.spec.members.size());
        for (const auto& r : default_plan(p.shape, size, RankSet::first(size), {}, {}, 0).runs)
            append_run(p.runs, SegmentMode::Gather, has_log->rank, r.contributors, r.count);
        return p;
    }
    for (std::uint32_t g = 0; g < n; ++g) append_run(p.runs, SegmentMode::Gather, holder->rank, carried(holder->at(p.shape, g)));
    return p;
}

RankSet OpPlanner::carried(const LabelRun& label) const {
    // C2: the set that travels with a final, not a guess.
    return in_.rules.c2 ? label.contributors : RankSet::first(static_cast<int>(in_.spec.members.size()));
}

std::optional<OpPlan> OpPlanner::repair(OpPlan p, const std::vector<Standing>& standings) {
    p.verdict = OpPlan::Verdict::Repair;
    const auto gone = newly_dead_;
    if (p.shape.is_direct()) {
        if (!gone.empty()) return fail(p, peer_failure(gone, in_.evidence, in_.epoch, advice_for(in_.spec.policy)));
        if (p.shape.has_root() && !voters_.has(p.shape.root)) return fail(p, lost_root());
        return p;  // run again from the untouched inputs
    }
    if (p.shape.kind == OpKind::Reduce && !voters_.has(p.shape.root)) return fail(p, lost_root());
    const std::uint32_t n = p.shape.blocks * p.shape.per_block;
    for (std::uint32_t g = 0; g < n; ++g) {
        const int block = static_cast<int>(g / p.shape.per_block);
        const Standing* holder = nullptr;
        RankSet set;
        bool all = true, lost = false;
        for (const auto& s : standings) {
            const auto label = s.at(p.shape, g);
            if (label.kind != LabelKind::Final) {
                all = false;
                lost |= label.kind == LabelKind::Empty && p.shape.runs_as() == OpKind::AllReduce;
                continue;
            }
            if (holder == nullptr) {
                holder = &s;
                set = carried(label);
            } else {
                FT_CHECK(!in_.rules.c2 || set == label.contributors, "two finals of segment %u with different contributors", g);
            }
        }
        // An input was written over by a final that then broke off: only under raise, where the death of who has it fails the operation.
        if (lost && holder == nullptr) return fail(p, lost_data());
        if (!repair_segment(p, block, holder, set, all)) return fail(p, lost_data());
    }
    if (p.shape.runs_as() == OpKind::AllReduce) {
        // Replay: as the operation would have gone, or the order of the sums, and with it their bits, would be another.
        if (in_.spec.policy == Policy::Replay && in_.rules.l7) keep_owners(p.runs, n);
        else spread_reductions(p.runs);
    }
    return p;
}

void OpPlanner::keep_owners(std::vector<SegmentRun>& runs, std::uint32_t segments) const {
    std::vector<SegmentRun> out;
    std::uint32_t g = 0;
    for (const auto& r : runs)
        for (std::uint32_t i = 0; i < r.count; ++i, ++g)
            append_run(out, r.mode, r.mode == SegmentMode::Reduce ? owner_of(g, segments, living_) : r.rank, r.contributors);
    runs = std::move(out);
}

void OpPlanner::spread_reductions(std::vector<SegmentRun>& runs) const {
    std::uint32_t total = 0, at = 0;
    for (const auto& r : runs)
        if (r.mode == SegmentMode::Reduce) total += r.count;
    std::vector<SegmentRun> out;
    for (const auto& r : runs) {
        if (r.mode != SegmentMode::Reduce) {
            out.push_back(r);
            continue;
        }
        for (std::uint32_t i = 0; i < r.count; ++i)
            append_run(out, SegmentMode::Reduce, owner_of(at++, total, living_), r.contributors);
    }
    runs = std::move(out);
}

bool OpPlanner::repair_segment(OpPlan& p, int block, const Standing* holder, const RankSet& set, bool all) {
    switch (p.shape.runs_as()) {
        case OpKind::AllReduce:
            if (all) {
                append_run(p.runs, SegmentMode::None, 0, set);
            } else if (holder != nullptr) {
                append_run(p.runs, SegmentMode::Gather, holder->rank, set);
            } else {
                append_run(p.runs, SegmentMode::Reduce, 0, voters_);  // spread_reductions() says whose
            }
            return true;
        case OpKind::Broadcast:
            if (holder == nullptr) return false;
            if (all) {
                append_run(p.runs, SegmentMode::None, 0, set);
            } else {
                append_run(p.runs, SegmentMode::Gather, voters_.has(p.shape.root) ? p.shape.root : holder->rank, set);
            }
            return true;
        case OpKind::AllGather:
            if (all) {
                append_run(p.runs, SegmentMode::None, 0, set);
            } else if (holder != nullptr) {
                append_run(p.runs, SegmentMode::Gather, voters_.has(block) ? block : holder->rank, set);
            } else {
                // Of a rank that died in it, now or in an earlier attempt: whoever has entered holds those absent from the start.
                return false;
            }
            return true;
        case OpKind::Reduce:
        case OpKind::ReduceScatter: {
            const int owner = p.shape.kind == OpKind::Reduce ? p.shape.root : block;
            if (!voters_.has(owner)) {
                append_run(p.runs, SegmentMode::None, 0, RankSet{});
            } else if (holder != nullptr) {
                append_run(p.runs, SegmentMode::None, 0, set);
            } else {
                append_run(p.runs, SegmentMode::Reduce, owner, voters_);
            }
            return true;
        }
        default: return true;
    }
}

}  // namespace ftcomm
