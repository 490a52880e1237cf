// What a small operation without a fence has, into its caller's buffer: at once, as nothing can fail any more (invariant B).
#pragma once

#include "base/copy.h"
#include "collectives/op_state.h"

namespace ftcomm {

// A block is final as it comes, whole, from who has put it in. What is final already is done again (L7).
inline void take_block(OpState& op, std::uint32_t block, const std::byte* data, std::size_t bytes, int from) {
    if (op.label(block) != LabelKind::Final) copy_bytes(op.result(block), data, bytes);
    op.set_final(block, RankSet::only(from));
}

// All blocks of what a rank asks for a part of, in the run's memory.
inline void give_blocks(OpState& op, std::byte* blocks) {
    op.desc.recv = blocks;
    for (std::uint32_t b = 0; b < op.grid.segments(); ++b) op.set_final(b, RankSet::only(static_cast<int>(b)));
}

// A sum of all inputs is where it is to be: for a caller that wants a part of it, in the run's memory.
inline void set_summed(OpState& op, void* sum) {
    if (op.is_part()) op.desc.recv = sum;
    for (std::uint32_t s = 0; s < op.grid.segments(); ++s) op.set_final(s, op.team);
}

// And where it is in the run's memory for all.
inline void give_sum(OpState& op, void* sum, std::size_t bytes) {
    if (!op.is_part()) copy_bytes(op.desc.recv, sum, bytes);
    set_summed(op, sum);
}

}  // namespace ftcomm
