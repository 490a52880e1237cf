// Which way an operation goes, of those that there are: the same on all ranks of an attempt (C8).
#include <algorithm>

#include "base/reduce.h"
#include "communicator/communicator.h"

namespace ftcomm {
namespace {

// Bytes of an all-reduce. On one host the ring stays in the caches; over several it sends more between them.
constexpr std::uint64_t kPullFrom = 4u << 20, kGroupsFrom = 2u << 20;
constexpr std::size_t kFewOnHost = 4;
constexpr std::uint64_t kMostForOne = 8192, kMostAddedByAll = 2048, kMostBesideLongLinks = 5120;  // bytes shown
constexpr std::uint64_t kMostByRoot = 4u << 20;  // of inputs that the root alone adds up: a ring of all is as fast then

// From where on a collective is read, in bytes of `count`, where what ranks write into links goes past their caches (base/streaming.h): a copy
// into a link and one out of it, by two processors at once, are faster than the kernel's one, which looks up each page.
std::uint64_t streamed_limit(const OpDesc& d, OpKind kind, std::size_t ranks, std::uint64_t otherwise) {
    constexpr std::uint64_t kNever = ~std::uint64_t{0};
    switch (kind) {
        case OpKind::AllReduce:
        case OpKind::ReduceScatter:
            // A ring rounds a sum at each hop but the last one, and 16 bits may not hold that of which they hold the average.
            return ranks > 2 && d.op == ReduceOp::Avg && is_narrow_float(d.dtype) ? otherwise : kNever;
        case OpKind::Broadcast: return ranks == 2 ? kNever : 256u << 10;  // round a ring each byte is copied n - 1 times
        case OpKind::AllGather: return ranks == 2 ? 64u << 10 : otherwise;
        default: return otherwise;
    }
}

}  // namespace

// Replay: nobody has returned from it, and it runs as it did the first time. (Where everyone puts its own in, a ring would log the result before
// all have begun it; and of a flat one that is taken for a sign that they have: OpPlanner::may_have_been_returned.)
bool Communicator::is_done_again(const OpState& op, const std::vector<SegmentRun>& plan) const {
    if (op.shape.runs_as() != OpKind::AllReduce) return !is_settled(op.seq);
    return std::all_of(plan.begin(), plan.end(), [](const SegmentRun& r) { return r.mode == SegmentMode::Reduce; });
}

// The same on all ranks of an attempt (C8): from the operation, from the decision, and from what never changes of those in it.
// `near`: if all can read each other; else inside the hosts.
bool Communicator::reads_memory(const OpState& op, bool near) const {
    if (decision_.frames_only) return false;
    auto limit = core_.read_limit();
    const auto kind = op.shape.kind;
    if (kind == OpKind::AllReduce && core_.config.reduce_pull_limit > 0) {
        limit = core_.config.reduce_pull_limit;
    } else if (core_.config.pull_limit == 0) {
        if (kind == OpKind::Reduce) return false;  // the root alone would do all of it
        if (kind == OpKind::AllReduce) limit = near ? kPullFrom : kGroupsFrom;
        // Ranks that read each other are on one machine, and agree on whether it streams (Address::check_agrees). Under replay the next
        // generation of the job may come up on another one, and has to add in the same order. (Two ranks have but one.)
        const bool is_kept = replays() && reduces(kind) && spec_.members.size() > 2;
        if (near && streams_decide() && !is_kept) limit = streamed_limit(op.desc, kind, spec_.members.size(), limit);
    }
    return op.shape.algorithm == Algorithm::Auto && op.grid.segments() > 0 && op.desc.count * size_of(op.desc.dtype) >= limit;
}

// Of ranks that share the processors of one host. Reading saves copies, and spends more than that on system calls and on what the caches have
// lost in between. C8: as above. Under replay a sum is not to depend on where a replacement comes up, or the next generation of the job: it is
// the same without windows, but that along a ring narrow floats are rounded by each rank.
// `near`: all can read each other.
bool Communicator::stages(const OpState& op, bool near) const {
    if (decision_.no_windows || !core_.view.crowded || living_.size() < 3 || living_.size() > kMostStaged) return false;
    if (op.shape.algorithm != Algorithm::Auto) return false;
    if (reduces(op.shape.kind) && op.shape.op == ReduceOp::PremulSum) return false;
    if (reduces(op.shape.kind) && replays()) {
        if (is_narrow_float(op.desc.dtype) && !(near && reads_memory(op, true))) return false;
        // In groups there is another order, unless nobody can read anybody.
        if (!near && op.shape.kind == OpKind::AllReduce && reads_memory(op, false)) return false;
    }
    if (!op.shape.is_direct() && op.grid.segments() == 0) return false;
    const bool has_parts = op.shape.kind == OpKind::AllGather || op.shape.kind == OpKind::ReduceScatter || op.shape.is_direct();
    const auto bytes = op.desc.count * size_of(op.desc.dtype) * (has_parts ? spec_.members.size() : 1);
    if (bytes < core_.config.stage_limit) return false;
    if (op.shape.kind == OpKind::Reduce && bytes * living_.size() > kMostByRoot) return false;
    return std::ranges::all_of(
        living_, [&](int r) { return r == rank_ || core_.transport.is_near(spec_.members[static_cast<std::size_t>(r)]); });
}

// Of a flat one: what goes up, sums in float32 at least, and what comes down have to fit a frame.
bool Communicator::fits_tree(OpKind kind, std::uint64_t bytes, std::size_t element) const {
    const auto least = reduces(kind) ? bytes / element * sizeof(float) : 0;
    return std::max<std::uint64_t>(bytes, least) <= core_.sender.max_payload();
}

bool Communicator::goes_by_tree(const OpState& op) const {
    if (!fits_tree(op.shape.kind, shared_bytes(op.desc, spec_.members.size()), size_of(op.desc.dtype))) return false;
    if (core_.config.has_flat_trees(living_.size())) return true;
    // Of one host: as fast where each has a processor of its own, and faster where they share them. (Under replay the order of a sum is not
    // to depend on where a replacement comes up.)
    const bool can = core_.config.flat_trees && living_.size() > kStraightOnHost && !replays();
    return can && (core_.view.crowded || all_share_memory());
}

// Of more than that, more share the processors and their caches: to read is faster then, as where nothing is streamed.
bool Communicator::streams_decide() const { return core_.config.streams() && spec_.members.size() <= kFewOnHost; }

// Where one rank alone gets something, or has something for one other: the more of it, the sooner messages are as fast.
std::uint64_t Communicator::post_limit(OpKind kind) const {
    const bool for_one = kind == OpKind::Reduce || (kind == OpKind::Broadcast && spec_.members.size() == 2);
    auto most = for_one ? std::min(core_.config.post_limit, kMostForOne) : core_.config.post_limit;
    // What is long finds lines in a long link that the other rank's cache has let go of, which a place among two does not.
    if (core_.config.paces_streams && core_.config.own_processor && spec_.members.size() == 2)
        most = std::min(most, kMostBesideLongLinks);
    return most;
}

// More than a few ranks that share processors: to look at what all show takes one switch of each of them, along a tree it takes two.
bool Communicator::goes_straight(const OpState& op, bool repair) const {
    if (!core_.view.crowded || board_.lacks_one() || core_.config.has_flat_trees(living_.size())) return false;
    auto most = post_limit(op.shape.kind);
    if (reduces(op.shape.kind)) most = std::min(most, kMostAddedByAll);
    return op.desc.count * size_of(op.desc.dtype) <= most && may_show(repair);
}

bool Communicator::all_share_memory() const {
    for (int r : decision_.alive.list())
        if (r != rank_ && !core_.transport.shares_memory(spec_.members[static_cast<std::size_t>(r)])) return false;
    return true;
}

// In a gather all sources write to their rings at once.
std::uint64_t Communicator::show_limit(OpKind kind) const {
    if (decision_.frames_only) return ~std::uint64_t{0};
    if (core_.config.pull_limit > 0) return core_.config.pull_limit;
    return kind == OpKind::Gather ? 1u << 20 : streams_decide() ? 128u << 10 : core_.read_limit();
}

// C8: from who takes part and from where they are, which is as it was when all boards became known. Nobody begins what comes after a flat operation
// before all have begun that, nor after one with a fence: what was shown two operations before is over for all. (Without fault tolerance
// there are no fences.)
bool Communicator::may_show(bool repair) const {
    const auto n = spec_.members.size();
    if (core_.config.post_limit == 0 || repair || living_.size() < n || n > Posts::kMostRanks || !(kFaultTolerant || after_flat_))
        return false;
    return board_.all_known() ||
           std::ranges::all_of(spec_.members, [&](int slot) { return slot == core_.self() || core_.transport.is_near(slot); });
}

std::unique_ptr<Run> Communicator::make_run(OpState& op, std::vector<SegmentRun> plan, bool repair, bool flat) {
    auto e = env();
    const bool near = !flat && all_share_memory();
    e.crowded = near && core_.view.crowded;
    const bool staged = !repair && stages(op, near);
    const bool fence = !repair || core_.rules.c3;
    if (staged && op.shape.is_direct() && all_alive()) {
        core_.host.trace("run.exchange");
        return make_exchange_run(e, op, core_.fresh_ticket());
    }
    if (op.shape.is_direct()) {
        core_.host.trace("run.direct");
        const DirectLimits limits{show_limit(op.shape.kind), core_.config.read_bytes, core_.config.piece_bytes};
        return make_direct_run(e, op, limits, core_.fresh_ticket());
    }
    if (flat && goes_by_tree(op)) {
        if (!goes_straight(op, repair)) {
            core_.host.trace("run.tree");
            return make_flat_tree_run(e, op, core_.config.spread_degree);
        }
        core_.host.trace("run.flat.many");
    }
    if (flat) {
        core_.host.trace("run.flat");
        looks_ = may_show(repair);
        if (looks_) let_look(e, op);
        return make_flat_run(e, op, std::move(idle_flat_));
    }
    if (staged && is_whole(plan, living_)) {
        core_.host.trace("run.stage");
        return make_stage_run(e, op, std::move(plan), core_.fresh_ticket(), near && reads_memory(op, true));
    }
    if (staged && is_first_hand(plan)) {
        core_.host.trace("run.blocks");
        return make_block_run(e, op, std::move(plan), core_.fresh_ticket());
    }
    if (near && reads_memory(op, true)) {
        core_.host.trace(repair ? "run.pull.repair" : "run.pull");
        return make_pull_run(e, op, std::move(plan), core_.fresh_ticket());
    }
    if (op.shape.kind == OpKind::AllReduce && !near && reads_memory(op, false)) {
        core_.host.trace(repair ? "run.groups.repair" : "run.groups");
        return make_groups_run(e, op, std::move(plan), fence, core_.fresh_ticket());
    }
    core_.host.trace(repair ? "run.repair" : "run.ring");
    return make_ring_run(e, op, std::move(plan), fence);
}

void Communicator::let_look(RunEnv& e, const OpState& op) {
    if (std::ranges::find(core_.lookers, this) == core_.lookers.end()) core_.lookers.push_back(this);
    e.posts = &posts_;
    e.post_limit = post_limit(op.shape.kind);
    e.shows = core_.all_logs_are_here();
    if (board_.all_known()) core_.host.trace("run.flat.shown");
}

}  // namespace ftcomm
