// How the run of an operation is made, the way that was chosen for it (ways.h), and what it is given.
#include <algorithm>

#include "base/check.h"
#include "communicator/communicator.h"

namespace ftcomm {

// Of the present attempt; a run has it until its end, which comes before the next attempt.
const std::vector<int>& Communicator::living() {
    if (living_.empty() || living_set_ != decision_.alive) {
        living_set_ = decision_.alive;
        living_ = living_set_.list();
    }
    return living_;
}

RunEnv Communicator::env() {
    RunEnv e{core_.sender,
             spec_.members,
             spec_.id,
             attempt_,
             rank_,
             living_,
             0,
             core_.rules,
             &core_.transport,
             &core_.scratch,
             &flat_rooms_[next_room_],
             &core_.tickets};
    e.windows = &core_.windows;
    e.board = &board_;
    e.stage_bytes = core_.config.stage_bytes;
    e.shared = &core_.shared;
    e.log = replays() ? this : nullptr;
    e.own_processor = core_.config.own_processor;
    e.pushes = core_.config.pushes && spec_.members.size() == 2;
    e.needs_inputs = spec_.policy != Policy::Raise;
    e.position = e.position_of(rank_);
    FT_CHECK(e.position >= 0, "rank %d is not among the living of %s", rank_, spec_.name.c_str());
    return e;
}

// Replay: nobody has returned from it, and it runs as it did the first time. (Where everyone puts its own in, a ring would log the result before
// all have begun it; and of a flat one that is taken for a sign that they have: OpPlanner::may_have_been_returned.)
bool Communicator::is_done_again(const OpState& op, const std::vector<SegmentRun>& plan) const {
    if (op.shape.runs_as() != OpKind::AllReduce) return !is_settled(op.seq);
    return std::all_of(plan.begin(), plan.end(), [](const SegmentRun& r) { return r.mode == SegmentMode::Reduce; });
}

std::unique_ptr<Run> Communicator::make_run(OpState& op, std::vector<SegmentRun> plan, bool repair, bool flat) {
    auto e = env();
    const Ways::Now now{living_, repair, flat, after_flat_};
    const auto chosen = ways_.choose(op, plan, now);
    e.crowded = chosen.near && core_.view.crowded;
    const bool fence = !repair || core_.rules.c3;
    switch (chosen.way) {
        case Way::Exchange: core_.host.trace("run.exchange"); return make_exchange_run(e, op, core_.fresh_ticket());
        case Way::Direct: {
            core_.host.trace("run.direct");
            const DirectLimits limits{ways_.show_limit(op.shape.kind), core_.config.read_bytes, core_.config.piece_bytes};
            return make_direct_run(e, op, limits, core_.fresh_ticket());
        }
        case Way::FlatTree: core_.host.trace("run.tree"); return make_flat_tree_run(e, op, core_.config.spread_degree);
        case Way::Flat:
            if (chosen.straight) core_.host.trace("run.flat.many");
            core_.host.trace("run.flat");
            looks_ = ways_.may_show(now);
            if (looks_) let_look(e, op);
            return make_flat_run(e, op, std::move(idle_flat_));
        case Way::Stage:
            core_.host.trace("run.stage");
            return make_stage_run(e, op, std::move(plan), core_.fresh_ticket(), chosen.near && chosen.reads);
        case Way::Blocks: core_.host.trace("run.blocks"); return make_block_run(e, op, std::move(plan), core_.fresh_ticket());
        case Way::Pull:
            core_.host.trace(repair ? "run.pull.repair" : "run.pull");
            return make_pull_run(e, op, std::move(plan), core_.fresh_ticket());
        case Way::Groups:
            core_.host.trace(repair ? "run.groups.repair" : "run.groups");
            return make_groups_run(e, op, std::move(plan), fence, core_.fresh_ticket());
        case Way::Ring: break;
    }
    core_.host.trace(repair ? "run.repair" : "run.ring");
    return make_ring_run(e, op, std::move(plan), fence);
}

void Communicator::let_look(RunEnv& e, const OpState& op) {
    if (std::ranges::find(core_.lookers, this) == core_.lookers.end()) core_.lookers.push_back(this);
    e.posts = &posts_;
    e.post_limit = ways_.post_limit(op.shape.kind);
    e.shows = core_.all_logs_are_here();
    if (board_.all_known()) core_.host.trace("run.flat.shown");
}

}  // namespace ftcomm
