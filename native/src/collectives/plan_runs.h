// Runs of segments that one plan is made of.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/records.h"

namespace ftcomm {

inline void append_run(std::vector<SegmentRun>& runs, SegmentMode mode, int rank, const RankSet& contributors,
                       std::uint32_t count = 1) {
    if (count == 0) return;
    if (!runs.empty() && runs.back().mode == mode && runs.back().rank == rank && runs.back().contributors == contributors) {
        runs.back().count += count;
    } else {
        runs.push_back({count, mode, rank, contributors});
    }
}

// The owner of a segment spreads the work evenly and contiguously over the living.
inline int owner_of(std::uint32_t segment, std::uint32_t segments, const std::vector<int>& living) {
    return living[static_cast<std::size_t>(std::uint64_t{segment} * living.size() / segments)];
}

}  // namespace ftcomm
