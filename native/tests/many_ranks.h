// Nine whole nodes and trees of degree 2, so that nine are many: 0 <- 1, 5; 1 <- 2, 3; 3 <- 4; 5 <- 6, 7; 7 <- 8.
#pragma once

#include <numeric>
#include <vector>

#include "tests/node_rig.h"

namespace ftcomm::unit {

struct ManyRanks {
    static constexpr int kRanks = 9;
    Rig rig{kRanks, {.timeout = 30 * Rig::kHeartbeat, .spread_degree = 2}};
    std::vector<int> all = std::vector<int>(kRanks);

    ManyRanks() { std::iota(all.begin(), all.end(), 0); }
    // All others know at once, and do what follows.
    void die(int slot) {
        rig.kill(slot);
        for (int s : all)
            if (s != slot) rig.evidence(s, slot, Evidence::Pidfd);
        rig.settle();
    }
    void let_go(int from, int to) {
        rig.hold(from, to, false);
        rig.settle();
    }
    void pass_ticks(int tenths_of_a_heartbeat) {
        for (int i = 0; i < tenths_of_a_heartbeat; ++i) {
            rig.advance(Rig::kHeartbeat / 10);
            rig.settle();
        }
    }
};

}  // namespace ftcomm::unit
