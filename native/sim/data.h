// Contents of every buffer, computed from (slot, step, index): inputs need not be stored and results can be recomputed.
// All values are small integers, exact in every type and under any order of reduction; only those of fill_rough() are not.
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

// Inputs of a program under the policy replay: whatever they are reduced to has other bits in another order. `state` is all that the
// rank has received so far, so that one wrong bit shows in everything that follows.
void fill_rough(DType dtype, std::uint64_t state, std::uint64_t count, std::byte* out);
std::uint64_t mixed(std::uint64_t a, std::uint64_t b);

// Messages from one rank to another in a Web or FanIn step, and bytes of each.
int message_count(const Step& step, int step_index, int from, int to);
std::uint64_t message_bytes(int step_index, int from, int to, int number);

// Contents of a point-to-point message.
void fill_message(int step_index, int from_slot, int number, std::uint64_t bytes, std::byte* out);

}  // namespace ftcomm::sim
