#include "collectives/plan.h"

#include <algorithm>

#include "collectives/op_planner.h"
#include "collectives/plan_runs.h"

namespace ftcomm {

DefaultPlan default_plan(const Shape& shape, int size, const RankSet& alive, const RankSet& dead,
                         const std::map<int, Evidence>& evidence, std::uint64_t epoch) {
    (void)size;
    DefaultPlan out;
    if (shape.has_root() && !alive.has(shape.root)) {
        out.cause = peer_failure(dead, evidence, epoch, advice_for(Policy::Lossy));  // others fail as a whole
        return out;
    }
    if (shape.is_direct()) return out;
    const auto living = alive.list();
    const std::uint32_t n = shape.blocks * shape.per_block;
    for (std::uint32_t b = 0; b < (n == 0 ? 0 : shape.blocks); ++b) {
        const int block = static_cast<int>(b);
        switch (shape.runs_as()) {
            case OpKind::AllReduce:
                for (std::uint32_t g = 0; g < shape.per_block; ++g)
                    append_run(out.runs, SegmentMode::Reduce, owner_of(g, n, living), alive);
                break;
            case OpKind::Broadcast: {
                append_run(out.runs, SegmentMode::Gather, shape.root, RankSet::only(shape.root), shape.per_block);
                break;
            }
            case OpKind::AllGather:
                if (alive.has(block)) {
                    append_run(out.runs, SegmentMode::Gather, block, RankSet::only(block), shape.per_block);
                } else {
                    append_run(out.runs, SegmentMode::Absent, 0, RankSet{}, shape.per_block);
                }
                break;
            case OpKind::Reduce: append_run(out.runs, SegmentMode::Reduce, shape.root, alive, shape.per_block); break;
            case OpKind::ReduceScatter:
                if (alive.has(block)) {
                    append_run(out.runs, SegmentMode::Reduce, block, alive, shape.per_block);
                } else {
                    append_run(out.runs, SegmentMode::None, 0, RankSet{}, shape.per_block);
                }
                break;
            default: break;
        }
    }
    return out;
}

namespace {

constexpr auto kNever = ~std::uint64_t{0};

// Replay: whoever leads may be new, and know of no failure but from the others.
void carry_failures(const PlanInput& in, Decision* d) {
    std::map<std::uint64_t, Cause> all;
    for (const auto& f : in.previous.failures) all.emplace(f.seq, f.cause);
    for (const auto& [rank, vote] : in.votes) {
        d->revoked_from = std::min(d->revoked_from, vote.revoked_from);
        for (const auto& f : vote.failures) all.emplace(f.seq, f.cause);
    }
    for (const auto& p : d->plans)
        if (p.verdict == OpPlan::Verdict::Fail) all.emplace(p.seq, p.cause);
    for (const auto& [seq, cause] : all) d->failures.push_back({seq, cause});
}

}  // namespace

Decision make_decision(const PlanInput& in) {
    RankSet voters;
    std::uint64_t lowest = ~std::uint64_t{0}, highest = 0;
    std::uint64_t known_done = 0;
    bool revoke = in.previous.revoked;
    Decision d;
    for (const auto& [rank, vote] : in.votes) {
        voters.add(rank);
        d.log_since.resize(std::max(d.log_since.size(), vote.log_since.size()));
        for (std::size_t r = 0; r < vote.log_since.size(); ++r) d.log_since[r] = std::max(d.log_since[r], vote.log_since[r]);
        lowest = std::min(lowest, vote.done_seq);
        d.done_through = std::max(d.done_through, vote.done_seq);
        known_done = std::max(known_done, vote.known_done);
        highest = std::max(highest, vote.done_seq);
        for (const auto& o : vote.ops) highest = std::max(highest, o.seq);
        for (const auto& p : vote.proposals) revoke |= p.seq == 0;
        revoke |= vote.revoked_from != kNever;
    }
    d.attempt = in.previous.attempt + 1;
    d.epoch = in.epoch;
    d.alive = voters;
    d.fail_from = in.previous.fail_from;
    d.cause = in.previous.cause;
    d.agree_seq = in.previous.agree_seq;
    d.agree_value = in.previous.agree_value;
    d.agree_cause = in.previous.agree_cause;
    d.agree_survivors = in.previous.agree_survivors;

    OpPlanner planner(in, voters, revoke, known_done);
    bool timed_out = false;
    bool fails_rest = false;
    // C5: a recorded failure stays recorded until all are past it, also when everybody who had entered the operation is gone.
    auto planned = highest;
    for (const auto& p : in.previous.plans)
        if (p.verdict == OpPlan::Verdict::Fail) planned = std::max(planned, p.seq);
    for (std::uint64_t seq = lowest + 1; seq <= planned && seq < d.fail_from && !fails_rest; ++seq) {
        auto p = planner.plan(seq, &fails_rest);
        if (p) {
            timed_out |= p->verdict == OpPlan::Verdict::Fail && p->cause.code == Code::Timeout;
            d.plans.push_back(std::move(*p));
        }
        if (fails_rest) d.fail_from = std::min(d.fail_from, seq);
    }
    d.done_through = std::max(d.done_through, planner.done_through());
    const auto newly_dead = in.previous.alive - voters;
    d.frames_only = in.previous.frames_only || planner.reads_are_refused();
    d.no_windows = in.previous.no_windows || planner.somebody_proposes(kNoWindow);
    if (in.spec.policy == Policy::Raise && !newly_dead.empty()) {
        // Nothing open, or the loop above stopped at the first operation that cannot be completed.
        if (!fails_rest) d.fail_from = std::min(d.fail_from, highest + 1);
        d.cause = peer_failure(in.dead, in.evidence, in.epoch, advice_for(in.spec.policy));
    }
    d.revoked = revoke || timed_out;
    d.revoked_from = in.previous.revoked ? in.previous.revoked_from : d.revoked ? highest + 1 : d.revoked_from;
    if (in.spec.policy == Policy::Replay) carry_failures(in, &d);
    return d;
}

std::string describe(const OpPlan& plan) {
    std::string text = plan.shape.text() + " #" + std::to_string(plan.seq) + ": ";
    if (plan.verdict == OpPlan::Verdict::Complete) return "#" + std::to_string(plan.seq) + ": complete";
    if (plan.verdict == OpPlan::Verdict::Fail) return "#" + std::to_string(plan.seq) + ": " + to_string(plan.cause.code);
    std::uint32_t by_mode[4] = {};
    for (const auto& r : plan.runs) by_mode[static_cast<int>(r.mode)] += r.count;
    return text + "keep " + std::to_string(by_mode[0]) + ", reduce " + std::to_string(by_mode[1]) + ", hand out " +
           std::to_string(by_mode[2]) + ", absent " + std::to_string(by_mode[3]) + " segments";
}

}  // namespace ftcomm
