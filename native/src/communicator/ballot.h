// The votes that have come for a communicator's next attempt: of each rank the one that counts. Who may vote, and what comes of it, others know.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "base/rank_set.h"
#include "collectives/records.h"

namespace ftcomm {

class Ballot {
public:
    void take(int rank, Vote vote) { votes_[rank] = std::move(vote); }

    // By way of another rank. What its own rank has sent straight here since says more.
    void take_passed_on(int rank, const Vote& vote) {
        const auto* known = find(rank, vote.attempt);
        if (known == nullptr || known->proposals.size() <= vote.proposals.size()) votes_[rank] = vote;
    }

    void forget(int rank) { votes_.erase(rank); }
    void forget_through(std::uint32_t attempt) {
        std::erase_if(votes_, [&](const auto& v) { return v.second.attempt <= attempt; });
    }

    const Vote* find(int rank, std::uint32_t attempt) const {
        const auto it = votes_.find(rank);
        return it != votes_.end() && it->second.attempt == attempt ? &it->second : nullptr;
    }

    RankSet voters(std::uint32_t attempt) const {
        RankSet out;
        for (const auto& [rank, vote] : votes_)
            if (vote.attempt == attempt) out.add(rank);
        return out;
    }

    std::map<int, Vote> of(const RankSet& ranks, std::uint32_t attempt) const {
        std::map<int, Vote> out;
        for (const auto& [rank, vote] : votes_)
            if (vote.attempt == attempt && ranks.has(rank)) out.emplace_hint(out.end(), rank, vote);
        return out;
    }

private:
    std::map<int, Vote> votes_;
};

}  // namespace ftcomm
