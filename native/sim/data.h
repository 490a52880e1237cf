// Contents of every buffer, computed from (slot, step, index): inputs need not be stored and results can be recomputed.
// All values are small integers, exact in every type and under any order of reduction.
#pragma once

#include <cstdint>

#include "base/bytes.h"
#include "base/dtype.h"
#include "sim/scenario.h"

namespace ftcomm::sim {

// Elements [start, start + count) of what `slot` contributes to `step`.
void fill(const Step& step, int step_index, int slot, std::uint64_t start, std::uint64_t count, std::byte* out);

// The reduction over `slots` of the elements [start, start + count) of their inputs (avg: divided by their number).
Bytes reduced(const Step& step, int step_index, const std::vector<int>& slots, std::uint64_t start, std::uint64_t count);

// Elements that rank `from` sends to rank `to` in gather, scatter (from: root) and all-to-all.
std::uint64_t piece(const Step& step, int from, int to);

// Contents of a point-to-point message.
void fill_message(int step_index, int from_slot, int number, std::uint64_t bytes, std::byte* out);

}  // namespace ftcomm::sim
