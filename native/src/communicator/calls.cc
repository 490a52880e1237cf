#include "communicator/calls.h"

#include <algorithm>

#include "base/reduce.h"
#include "collectives/overlap.h"
#include "collectives/run.h"
#include "communicator/core.h"

namespace ftcomm {

namespace {

// At most `segment` elements, and as many segments for each rank: else some own one more than others, and all wait for them.
std::uint64_t equal_segments(std::uint64_t count, std::uint64_t segment, std::uint64_t ranks) {
    const auto least = (count + segment - 1) / segment;
    const auto segments = (least + ranks - 1) / ranks * ranks;
    return segments == 0 ? segment : std::min(segment, ((count + segments - 1) / segments + 15) & ~std::uint64_t{15});
}

// Bytes of what all have at the end.
std::uint64_t flat_limit_of(OpKind kind, std::size_t ranks) {
    switch (kind) {
        case OpKind::Reduce: return ranks <= 2 ? 16384 : 4096;
        case OpKind::ReduceScatter: return ranks <= 4 ? 8192 : 4096;
        case OpKind::AllReduce: return ranks <= 2 ? 65536 : ranks == 3 ? 32768 : 16384;
        case OpKind::AllToAll: return ranks <= 2 ? 65536 : ranks <= 4 ? 16384 : 8192;
        default: return ranks <= 4 ? 65536 : 16384;
    }
}

// Where ranks share processors, what one waits for costs it a switch to another one: few messages are the faster way for longer.
std::uint64_t crowded_flat_limit_of(OpKind kind, std::size_t ranks, bool staged, bool shown) {
    switch (kind) {
        case OpKind::Reduce: return staged ? 8192 : ranks == 3 ? 65536 : ranks == 4 ? 16384 : 32768;
        case OpKind::ReduceScatter: return ranks <= 4 ? 16384 : 65536;
        case OpKind::AllToAll: return shown ? (ranks <= 4 ? 49152 : 65536) : ranks <= 4 ? 16384 : 32768;
        case OpKind::AllReduce:
            if (staged) return ranks <= 6 ? 16384 : 49152;
            return ranks <= 4 ? 32768 : 65536;
        case OpKind::Broadcast: return staged ? 32768 : 65536;  // by windows each byte is copied less often
        default: return 65536;
    }
}

// Nothing of an all-to-all is passed on: what windows save are messages and system calls, for a second copy. So of some ranks, and not of much
// (but where links are as dear as windows, and few share the caches).
constexpr std::size_t kLeastExchanged = 4, kFewOnHost = 4;
constexpr std::uint64_t kMostExchanged = 1u << 20,
                        kMostExchangedPast = 4u << 20;  // bytes of a rank's input; where links go past the caches

}  // namespace

Calls::Calls(const Core& core, const CommSpec& spec) : core_(core), spec_(spec) {
    for (int m : spec_.members) members_hash_ = (members_hash_ + static_cast<std::uint64_t>(m) + 1) * 0x9e3779b97f4a7c15ULL;
}

Status Calls::check(const OpDesc& d) const {
    const auto size = static_cast<int>(spec_.members.size());
    const auto n = static_cast<std::size_t>(size);
    if (d.root < 0 || d.root >= size)
        return Status::error(Code::Invalid, "root " + std::to_string(d.root) + " is not a rank of this communicator of size " +
                                                std::to_string(size));
    if (reduces(d.kind) && !reduce_supported(d.dtype, d.op))
        return Status::error(Code::Unsupported, std::string(to_string(d.op)) + " is not defined for " + to_string(d.dtype));
    const auto& per = d.per_rank();
    for (const auto* v : {&per.send_counts, &per.send_offsets, &per.recv_counts, &per.recv_offsets})
        if (!v->empty() && v->size() != n)
            return Status::error(Code::Invalid, "counts and offsets need one entry per rank (" + std::to_string(size) +
                                                    "), got " + std::to_string(v->size()));
    if (d.algorithm == Algorithm::RingLogged && (d.kind != OpKind::AllReduce || !replays()))
        return Status::error(Code::Unsupported,
                             "ring-logged is an all_reduce made of logged messages: it needs the policy replay (ftrun --policy)");
    return {};
}

// Each rank sends to all others what it has, n(n-1) messages: where it is little, and, where nothing is summed and every rank only says that it
// is there, not by many; many send 2(n-1) along a tree. C8: the same table on all ranks; what it says is part of the signature.
bool Calls::is_flat(const OpDesc& d) const {
    const auto n = spec_.members.size();
    // An all-to-all with counts is not: what others have for each other is not known here. (Nor one under replay, where a result is logged.)
    const auto& per = d.per_rank();
    const bool counts =
        !(per.send_counts.empty() && per.send_offsets.empty() && per.recv_counts.empty() && per.recv_offsets.empty());
    const bool all_to_all = d.kind == OpKind::AllToAll && !counts && !replays();
    const bool can_be = d.kind == OpKind::AllReduce || ((gathers(d.kind) || reduces(d.kind) || all_to_all) && n > 1);
    const bool has_parts = d.kind == OpKind::ReduceScatter || all_to_all;
    const auto message = d.count * size_of(d.dtype) * (has_parts ? n : 1);
    if (!can_be || d.algorithm == Algorithm::Ring || message > core_.sender.max_payload()) return false;
    if (d.algorithm == Algorithm::Flat) return true;
    if (all_to_all && n > kStraight) return false;  // each gets n times as much as it asks for
    if (gathers(d.kind) && n > kStraight && !core_.config.has_flat_trees(n)) return false;
    const auto bytes = d.kind == OpKind::AllGather || all_to_all ? n * message : message;
    const bool premultiplied = reduces(d.kind) && d.op == ReduceOp::PremulSum;
    const bool staged = !premultiplied && n <= kMostStaged && core_.config.stage_limit <= message;
    auto limit = n > 2 && prefers_few_messages(d, bytes)
                     ? crowded_flat_limit_of(d.kind, n, staged, message <= core_.config.post_limit)
                     : flat_limit_of(d.kind, n);
    // A limit that was tuned is that of an all-reduce.
    if (const auto given = core_.config.flat_limit; given > 0)
        limit = d.kind == OpKind::Reduce || has_parts ? std::min(limit, given) : given;
    return bytes <= limit;
}

// Where all parts are as long, and all call it so: part of the signature, as of a small one.
bool Calls::may_exchange_in_windows(const OpDesc& d) const {
    const auto n = spec_.members.size();
    if (d.kind != OpKind::AllToAll || d.layout != nullptr || d.count == 0 || !core_.view.crowded || replays()) return false;
    const auto bytes = d.count * size_of(d.dtype) * n;
    return n >= kLeastExchanged && n <= kMostStaged &&
           (bytes <= (core_.config.streams() ? kMostExchangedPast : kMostExchanged) || streams_decide()) &&
           bytes >= core_.config.stage_limit;
}

// Not under replay, where a later generation of the job may be on other machines, and has to do the same. And not what would go straight to
// more ranks than that is good for, nor sums of narrow numbers there, which each rank makes for itself.
bool Calls::prefers_few_messages(const OpDesc& d, std::uint64_t bytes) const {
    if (!core_.view.crowded || replays()) return false;
    if (spec_.members.size() <= kStraightOnHost) return !reduces(d.kind) || size_of(d.dtype) >= sizeof(float);
    return core_.config.flat_trees &&
           ((d.kind == OpKind::AllToAll && core_.config.post_limit > 0) || fits_tree(d.kind, bytes, size_of(d.dtype)));
}

Shape Calls::shape_of(const OpDesc& d, Grid* grid) const {
    Shape s;
    s.kind = d.kind;
    s.dtype = d.dtype;
    s.root = d.root;
    s.factor = d.factor;
    if (reduces(d.kind)) s.op = d.op;
    const auto n = static_cast<std::uint32_t>(spec_.members.size());
    const auto esize = size_of(d.dtype);
    const auto limit = core_.config.segment_bytes > 0 ? core_.config.segment_bytes : kSegmentBytes;
    s.algorithm = is_flat(d)                       ? Algorithm::Flat
                  : may_exchange_in_windows(d)     ? Algorithm::Auto
                  : s.is_direct()                  ? Algorithm::Direct
                  : d.algorithm == Algorithm::Ring ? Algorithm::Ring
                                                   : Algorithm::Auto;
    // Counts differ between ranks with and without per-rank counts; pairs check their own
    s.count = s.algorithm == Algorithm::Direct ? 0 : d.count;
    auto segment = std::min<std::uint64_t>(limit, core_.sender.max_payload()) / esize;
    if (d.kind == OpKind::AllReduce && segment > 0) segment = equal_segments(d.count, segment, n);
    const bool blocked = s.runs_as() == OpKind::AllGather || s.runs_as() == OpKind::ReduceScatter;
    const bool has_parts = s.runs_as() != s.kind && d.kind != OpKind::Reduce;
    const auto all = s.is_direct() ? 0 : has_parts ? d.count * n : d.count;  // elements of a block
    // A block of a flat one is one segment: a rank has all of its input, or all of the result, so it can be run again as it was (L7).
    *grid = Grid::make(blocked ? n : 1, all, s.algorithm == Algorithm::Flat ? all : segment);
    s.blocks = grid->blocks;
    s.per_block = grid->per_block;
    return s;
}

std::uint64_t Calls::signature_of(const Shape& shape) {
    if (signature_ == 0 || !(signed_ == shape)) {
        auto what = shape;
        if (!core_.rules.c8) what.algorithm = Algorithm::Ring;  // rule C8 switched off
        signed_ = shape;
        signature_ = what.signature() + members_hash_ + static_cast<std::uint64_t>(spec_.policy);
        // Under replay a sum that is done again has to take the way that it took.
        if (what.algorithm == Algorithm::Flat && core_.config.has_flat_trees(spec_.members.size()))
            signature_ += static_cast<std::uint64_t>(core_.config.spread_degree) * 0x9e3779b97f4a7c15ULL;
    }
    return signature_;
}

bool Calls::is_last(const OpDesc& d) const {
    const auto& c = last_;
    return any_ && d.count == c.count && d.kind == c.kind && d.dtype == c.dtype && d.op == c.op && d.algorithm == c.algorithm &&
           d.root == c.root && OpDesc::same_factor(d.factor, c.factor) && d.layout == nullptr;
}

void Calls::keep(const OpDesc& d) {
    shape_ = shape_of(d, &grid_);
    any_ = d.layout == nullptr;
    if (any_) last_ = d;
}

bool Calls::streams_decide() const { return core_.config.streams() && spec_.members.size() <= kFewOnHost; }

bool Calls::fits_tree(OpKind kind, std::uint64_t bytes, std::size_t element) const {
    const auto least = reduces(kind) ? bytes / element * sizeof(float) : 0;
    return std::max<std::uint64_t>(bytes, least) <= core_.sender.max_payload();
}

}  // namespace ftcomm
