// What an operation leaves at one rank: where it lies, and what is said of it once it is known to be complete.
#pragma once

#include <span>
#include <vector>

#include "collectives/op_state.h"

namespace ftcomm {

// The parts of the caller's memory that the operation fills at this rank, in a fixed order; none where it has no result here.
std::vector<std::span<std::byte>> result_pieces(const OpState& op, int rank, int size);

// Of a result that all ranks have, shared out among some of them (ascending): the parts that this one owned, and its part of what ranks
// outside owned. The parts of all of them are the whole.
std::vector<std::span<std::byte>> shared_pieces(const OpState& op, const std::vector<int>& among, int rank, int size);

// Of a result that all of `size` ranks have.
std::uint64_t shared_elements(const OpDesc& desc, std::size_t size);
std::uint64_t shared_bytes(const OpDesc& desc, std::size_t size);

// The same of a result without a fence, which all of them have made: an equal part of it each, in one piece (maybe none).
struct Elements {
    std::uint64_t from = 0, count = 0;
};
Elements equal_part(std::uint64_t count, const std::vector<int>& among, int rank);
std::span<std::byte> bytes_of(const OpState& op, Elements part);

// Labels of a result that was read from the log: as a healthy run among all ranks leaves them.
void mark_complete(OpState& op, int rank, int size);

}  // namespace ftcomm
