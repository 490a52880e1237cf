// Where each rank's part lies in a buffer, in elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ftcomm {

struct Layout {
    const std::vector<std::uint64_t>& counts;  // empty: `uniform` each
    const std::vector<std::uint64_t>& offsets;  // empty: one after another
    std::uint64_t uniform;

    std::uint64_t count(int r) const { return counts.empty() ? uniform : counts[static_cast<std::size_t>(r)]; }
    std::uint64_t offset(int r) const {
        if (!offsets.empty()) return offsets[static_cast<std::size_t>(r)];
        if (counts.empty()) return uniform * static_cast<std::uint64_t>(r);
        std::uint64_t at = 0;
        for (int i = 0; i < r; ++i) at += counts[static_cast<std::size_t>(i)];
        return at;
    }
    // Behind the last element of any part.
    std::uint64_t end(int ranks) const {
        if (offsets.empty()) return offset(ranks);
        std::uint64_t most = 0;
        for (int r = 0; r < ranks; ++r)
            if (count(r) > 0) most = std::max(most, offset(r) + count(r));
        return most;
    }
};

}  // namespace ftcomm
