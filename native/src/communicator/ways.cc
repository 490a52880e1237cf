#include "communicator/ways.h"

#include <algorithm>

#include "base/reduce.h"
#include "collectives/posts.h"
#include "collectives/results.h"
#include "collectives/run.h"
#include "communicator/core.h"

namespace ftcomm {
namespace {

// Bytes of an all-reduce. On one host the ring stays in the caches; over several it sends more between them.
constexpr std::uint64_t kPullFrom = 4u << 20, kGroupsFrom = 2u << 20;
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

// `near`: if all can read each other; else inside the hosts.
bool Ways::reads_memory(const OpState& op, bool near) const {
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
        if (near && calls_.streams_decide() && !is_kept) limit = streamed_limit(op.desc, kind, spec_.members.size(), limit);
    }
    return op.shape.algorithm == Algorithm::Auto && op.grid.segments() > 0 && op.desc.count * size_of(op.desc.dtype) >= limit;
}

// Of ranks that share the processors of one host. Reading saves copies, and spends more than that on system calls and on what the caches have
// lost in between. C8: as above. Under replay a sum is not to depend on where a replacement comes up, or the next generation of the job: it is
// the same without windows, but that along a ring narrow floats are rounded by each rank.
// `near`: all can read each other.
bool Ways::stages(const OpState& op, bool near, const Now& now) const {
    if (decision_.no_windows || !core_.view.crowded || now.living.size() < 3 || now.living.size() > kMostStaged) return false;
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
    if (op.shape.kind == OpKind::Reduce && bytes * now.living.size() > kMostByRoot) return false;
    return std::ranges::all_of(
        now.living, [&](int r) { return r == rank_ || core_.transport.is_near(spec_.members[static_cast<std::size_t>(r)]); });
}

bool Ways::goes_by_tree(const OpState& op, const Now& now) const {
    if (!calls_.fits_tree(op.shape.kind, shared_bytes(op.desc, spec_.members.size()), size_of(op.desc.dtype))) return false;
    if (core_.config.has_flat_trees(now.living.size())) return true;
    // Of one host: as fast where each has a processor of its own, and faster where they share them. (Under replay the order of a sum is not
    // to depend on where a replacement comes up.)
    const bool can = core_.config.flat_trees && now.living.size() > kStraightOnHost && !replays();
    return can && (core_.view.crowded || all_share_memory());
}

// Where one rank alone gets something, or has something for one other: the more of it, the sooner messages are as fast.
std::uint64_t Ways::post_limit(OpKind kind) const {
    const bool for_one = kind == OpKind::Reduce || (kind == OpKind::Broadcast && spec_.members.size() == 2);
    auto most = for_one ? std::min(core_.config.post_limit, kMostForOne) : core_.config.post_limit;
    // What is long finds lines in a long link that the other rank's cache has let go of, which a place among two does not.
    if (core_.config.paces_streams && core_.config.own_processor && spec_.members.size() == 2)
        most = std::min(most, kMostBesideLongLinks);
    return most;
}

// More than a few ranks that share processors: to look at what all show takes one switch of each of them, along a tree it takes two.
bool Ways::goes_straight(const OpState& op, const Now& now) const {
    if (!core_.view.crowded || board_.lacks_one() || core_.config.has_flat_trees(now.living.size())) return false;
    auto most = post_limit(op.shape.kind);
    if (reduces(op.shape.kind)) most = std::min(most, kMostAddedByAll);
    return op.desc.count * size_of(op.desc.dtype) <= most && may_show(now);
}

bool Ways::all_share_memory() const {
    for (int r : decision_.alive.list())
        if (r != rank_ && !core_.transport.shares_memory(spec_.members[static_cast<std::size_t>(r)])) return false;
    return true;
}

// In a gather all sources write to their rings at once.
std::uint64_t Ways::show_limit(OpKind kind) const {
    if (decision_.frames_only) return ~std::uint64_t{0};
    if (core_.config.pull_limit > 0) return core_.config.pull_limit;
    return kind == OpKind::Gather ? 1u << 20 : calls_.streams_decide() ? 128u << 10 : core_.read_limit();
}

// C8: from who takes part and from where they are, which is as it was when all boards became known. Nobody begins what comes after a flat operation
// before all have begun that, nor after one with a fence: what was shown two operations before is over for all. (Without fault tolerance
// there are no fences.)
bool Ways::may_show(const Now& now) const {
    const auto n = spec_.members.size();
    if (core_.config.post_limit == 0 || now.repair || now.living.size() < n || n > Posts::kMostRanks ||
        !(kFaultTolerant || now.after_flat))
        return false;
    return board_.all_known() ||
           std::ranges::all_of(spec_.members, [&](int slot) { return slot == core_.self() || core_.transport.is_near(slot); });
}

Ways::Choice Ways::choose(const OpState& op, const std::vector<SegmentRun>& plan, const Now& now) const {
    Choice c{Way::Ring};
    c.near = !now.flat && all_share_memory();
    const bool staged = !now.repair && stages(op, c.near, now);
    if (op.shape.is_direct()) {
        c.way = staged && now.living.size() == spec_.members.size() ? Way::Exchange : Way::Direct;
    } else if (now.flat) {
        const bool tree = goes_by_tree(op, now);
        c.straight = tree && goes_straight(op, now);
        c.way = tree && !c.straight ? Way::FlatTree : Way::Flat;
    } else {
        c.reads = reads_memory(op, c.near);
        if (staged && is_whole(plan, now.living)) c.way = Way::Stage;
        else if (staged && is_first_hand(plan)) c.way = Way::Blocks;
        else if (c.reads && c.near) c.way = Way::Pull;
        else if (c.reads && op.shape.kind == OpKind::AllReduce) c.way = Way::Groups;
    }
    return c;
}

}  // namespace ftcomm
