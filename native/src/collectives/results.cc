#include "collectives/results.h"

#include <algorithm>

#include "collectives/plan.h"

namespace ftcomm {

std::vector<std::span<std::byte>> result_pieces(const OpState& op, int rank, int size) {
    const auto& d = op.desc;
    const auto element = size_of(d.dtype);
    auto* base = static_cast<std::byte*>(d.recv);
    std::vector<std::span<std::byte>> pieces;
    const auto add = [&](std::uint64_t offset, std::uint64_t count) {
        if (base != nullptr && count > 0) pieces.emplace_back(base + offset * element, count * element);
    };
    switch (op.shape.runs_as()) {
        case OpKind::AllReduce:
        case OpKind::Broadcast:
        case OpKind::ReduceScatter: add(0, d.count); break;
        case OpKind::Reduce:
            if (rank == d.root) add(0, d.count);
            break;
        case OpKind::AllGather: add(0, d.count * static_cast<std::uint64_t>(size)); break;
        case OpKind::Scatter: add(0, d.count); break;
        case OpKind::Gather:
            if (rank != d.root) break;
            [[fallthrough]];
        case OpKind::AllToAll: {
            const auto& per = d.per_rank();
            std::uint64_t packed = 0;
            for (int r = 0; r < size; ++r) {
                const auto i = static_cast<std::size_t>(r);
                const auto count = per.recv_counts.empty() ? d.count : per.recv_counts[i];
                add(per.recv_offsets.empty() ? packed : per.recv_offsets[i], count);
                packed += count;
            }
            break;
        }
        case OpKind::Barrier: break;
    }
    return pieces;
}

std::uint64_t shared_elements(const OpDesc& desc, std::size_t size) {
    return desc.count * (desc.kind == OpKind::AllGather ? size : 1);
}

std::uint64_t shared_bytes(const OpDesc& desc, std::size_t size) { return shared_elements(desc, size) * size_of(desc.dtype); }

Elements equal_part(std::uint64_t count, const std::vector<int>& among, int rank) {
    const auto at = static_cast<std::uint64_t>(std::lower_bound(among.begin(), among.end(), rank) - among.begin());
    const auto from = count * at / among.size(), to = count * (at + 1) / among.size();
    return {from, to - from};
}

std::span<std::byte> bytes_of(const OpState& op, Elements part) {
    const auto element = size_of(op.desc.dtype);
    return {static_cast<std::byte*>(op.desc.recv) + part.from * element, part.count * element};
}

std::vector<std::span<std::byte>> shared_pieces(const OpState& op, const std::vector<int>& among, int rank, int size) {
    const auto keeper = [&](int owner) {
        return std::binary_search(among.begin(), among.end(), owner) ? owner
                                                                     : among[static_cast<std::size_t>(owner) % among.size()];
    };
    const auto element = size_of(op.desc.dtype);
    auto* base = static_cast<std::byte*>(op.desc.recv);
    std::vector<std::span<std::byte>> pieces;
    if (op.shape.algorithm == Algorithm::Flat) {
        const auto part = equal_part(shared_elements(op.desc, op.shape.blocks), among, rank);
        if (part.count > 0) pieces.push_back(bytes_of(op, part));
        return pieces;
    }
    std::uint32_t s = 0;
    for (const auto& run : default_plan(op.shape, size, RankSet::first(size), {}, {}, 0).runs) {
        const auto last = s + run.count - 1;
        // A run may go over blocks: offsets then go on without a gap, as the blocks are full but for the last.
        const auto from = op.grid.offset(s), to = op.grid.offset(last) + op.grid.count(last);
        if (keeper(run.rank) == rank) pieces.emplace_back(base + from * element, (to - from) * element);
        s += run.count;
    }
    return pieces;
}

void mark_complete(OpState& op, int rank, int size) {
    const auto all = RankSet::first(size);
    std::uint32_t s = 0;
    for (const auto& run : default_plan(op.shape, size, all, {}, {}, 0).runs) {
        for (std::uint32_t i = 0; i < run.count; ++i, ++s) {
            const bool here = op.shape.shares_finals() || run.rank == rank;
            const bool moved = run.mode == SegmentMode::Reduce || run.mode == SegmentMode::Gather;
            if (here && moved && op.label(s) != LabelKind::Final) op.set_final(s, run.contributors);
        }
    }
}

}  // namespace ftcomm
