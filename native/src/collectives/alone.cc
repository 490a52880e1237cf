// One living rank: nothing is sent. Also a replacement before its admission: its calls act on itself alone, so that a script's
// prologue (a wrapper's parameter check, first broadcasts) passes; the join point then loads the survivors' state.
#include <algorithm>
#include <cstring>

#include "base/copy.h"
#include "base/reduce.h"
#include "collectives/run.h"

namespace ftcomm {

namespace {

void finish_reduction(OpState& op, std::uint32_t s, const RankSet& self) {
    auto* out = op.result(s);
    if (out == nullptr) return;
    const auto n = op.grid.count(s);
    const auto* in = op.input(s);
    if (op.desc.op == ReduceOp::PremulSum) {
        scale(op.desc.dtype, out, in, n, op.desc.factor);
    } else if (in != out) {
        std::memmove(out, in, op.segment_bytes(s));
    }
    op.set_final(s, self);
}

// Who is dead has nothing to give: zeros, as with more survivors.
void clear_others(const OpDesc& d, int ranks, int rank) {
    const auto& per = d.per_rank();
    const auto size = size_of(d.dtype);
    std::uint64_t at = 0;
    for (int r = 0; r < ranks; ++r) {
        const auto i = static_cast<std::size_t>(r);
        const auto count = per.recv_counts.empty() ? d.count : per.recv_counts[i];
        if (!per.recv_offsets.empty()) at = per.recv_offsets[i];
        if (r != rank && count > 0) std::memset(static_cast<std::byte*>(d.recv) + at * size, 0, count * size);
        at += count;
    }
}

void direct_alone(OpState& op, int ranks, int rank, bool solo) {
    const auto& d = op.desc;
    const auto& per = d.per_rank();
    const auto size = size_of(d.dtype);
    auto at = [&](const std::vector<std::uint64_t>& counts, const std::vector<std::uint64_t>& offsets) {
        if (!offsets.empty()) return offsets[static_cast<std::size_t>(rank)];
        std::uint64_t sum = 0;
        for (int i = 0; i < rank; ++i) sum += counts.empty() ? d.count : counts[static_cast<std::size_t>(i)];
        return sum;
    };
    if (d.recv == nullptr) return;
    if (rank != d.root && op.shape.kind != OpKind::AllToAll) return;
    std::uint64_t from = 0, to = 0, count = d.count;
    if (op.shape.kind == OpKind::Scatter || op.shape.kind == OpKind::AllToAll) {
        from = at(per.send_counts, per.send_offsets);
        if (!per.send_counts.empty()) count = per.send_counts[static_cast<std::size_t>(rank)];
    }
    if (op.shape.kind == OpKind::Gather || op.shape.kind == OpKind::AllToAll) {
        to = at(per.recv_counts, per.recv_offsets);
        if (!per.recv_counts.empty()) count = std::min(count, per.recv_counts[static_cast<std::size_t>(rank)]);
    }
    if (count > 0 && d.send != nullptr)
        std::memmove(static_cast<std::byte*>(d.recv) + to * size, static_cast<const std::byte*>(d.send) + from * size,
                     count * size);
    if (!solo && op.shape.kind != OpKind::Scatter) clear_others(d, ranks, rank);  // it may lie where its input was
}

}  // namespace

void run_alone(OpState& op, int ranks, int rank, const std::vector<SegmentRun>& plan, bool solo) {
    const auto self = RankSet::only(rank);
    if (solo && op.shape.kind == OpKind::AllToAll && !op.shape.is_direct()) op.go_directly(op.signature);
    if (op.shape.is_direct()) {
        direct_alone(op, ranks, rank, solo);
        return;
    }
    if (solo) {
        for (std::uint32_t s = 0; s < op.grid.segments(); ++s) {
            if (op.label(s) == LabelKind::Final) continue;
            if (op.shape.kind == OpKind::AllGather) {  // every block is a copy of its own: shapes and values look alike
                const auto own = static_cast<std::uint32_t>(rank) * op.grid.per_block + s % op.grid.per_block;
                copy_bytes(op.result(s), op.result(own), op.segment_bytes(s));
                op.set_final(s, self);
            } else if (op.shape.kind == OpKind::Broadcast) {
                op.set_final(s, self);  // what the caller has is what it gets
            } else {
                finish_reduction(op, s, self);
            }
        }
        return;
    }
    std::uint32_t s = 0;
    for (const auto& r : plan) {
        for (std::uint32_t i = 0; i < r.count; ++i, ++s) {
            if (r.mode == SegmentMode::Reduce) finish_reduction(op, s, r.contributors);
            if (r.mode == SegmentMode::Absent) {
                if (auto* p = op.result(s)) std::memset(p, 0, op.segment_bytes(s));
                op.set_final(s, RankSet{});
            }
        }
    }
}

}  // namespace ftcomm
