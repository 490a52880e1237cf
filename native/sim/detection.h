// Failures are noticed in time, and the right rank goes. These bounds hold only while nothing but the failure itself disturbs the
// run, so every other fault switches them off.
#pragma once

#include <map>
#include <vector>

#include "communicator/node.h"
#include "sim/scenario.h"

namespace ftcomm::sim {

class World;
struct Instance;

class Detection {
public:
    explicit Detection(World& world);
    void died(const Instance& dead);  // deaths of one lost host are told apart by Instance::lost_host
    void check(const Instance& dead);  // the Detected event: by now everybody must know
    void removed(const Instance& by, const NodeEvent& event);
    int host_lost() { return lost_hosts_++; }  // a number for the ranks that go down with it
    // Nothing gets through between the two sides from now on, and resets tell both.
    void cut_off(const RankSet& smaller, const RankSet& larger);
    void disturbed();  // silence may have another reason
    void exited() { calm_ = false; }  // a clean exit is no silence, but shifts every clock

private:
    struct Death {
        Time at = 0;
        int lost_host = -1;
    };
    void weigh_sides();

    World& world_;
    bool calm_ = false;
    int lost_hosts_ = 0;
    std::vector<Death> deaths_;
    std::map<std::pair<int, int>, std::uint64_t> left_in_;  // (observer, lost host) -> epoch
    RankSet smaller_, larger_;  // sides of a cut, empty: none to look at
};

}  // namespace ftcomm::sim
