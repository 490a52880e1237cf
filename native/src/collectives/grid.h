// How an operation's data is cut: blocks (one per rank where the operation has them), each into segments. The grid comes from the
// communicator's size and the operation alone, never from who is alive (C5): labels of different ranks are comparable.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ftcomm {

struct Grid {
    std::uint32_t blocks = 1;
    std::uint64_t block_elements = 0;
    std::uint64_t segment_elements = 1;
    std::uint32_t per_block = 0;  // segments of a block

    static Grid make(std::uint32_t blocks, std::uint64_t block_elements, std::uint64_t segment_elements) {
        Grid g;
        g.blocks = blocks;
        g.block_elements = block_elements;
        g.segment_elements = std::max<std::uint64_t>(1, segment_elements);
        g.per_block = static_cast<std::uint32_t>((block_elements + g.segment_elements - 1) / g.segment_elements);
        return g;
    }
    std::uint32_t segments() const { return blocks * per_block; }
    std::uint32_t block_of(std::uint32_t segment) const { return segment / per_block; }
    // First element of the segment, counted over all blocks.
    std::uint64_t offset(std::uint32_t segment) const {
        return block_of(segment) * block_elements + (segment % per_block) * segment_elements;
    }
    std::uint64_t count(std::uint32_t segment) const {
        return std::min(segment_elements, block_elements - (segment % per_block) * segment_elements);
    }
    // Of so many side by side in one block.
    std::uint64_t count(std::uint32_t first, std::uint32_t segments) const {
        return (segments - 1) * segment_elements + count(first + segments - 1);
    }
};

}  // namespace ftcomm
