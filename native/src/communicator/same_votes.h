// Votes of several ranks in one frame: those that say the same have one entry.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "base/rank_set.h"

namespace ftcomm {

template <class V>
class SameVotes {
public:
    void add(int rank, V vote) {
        auto same = std::find_if(votes_.begin(), votes_.end(), [&](const auto& known) { return known.first == vote; });
        if (same == votes_.end()) same = votes_.insert(same, {std::move(vote), {}});
        same->second.add(rank);
    }
    const std::vector<std::pair<V, RankSet>>& list() const { return votes_; }
    std::uint32_t count() const { return static_cast<std::uint32_t>(votes_.size()); }

private:
    std::vector<std::pair<V, RankSet>> votes_;
};

}  // namespace ftcomm
