// ftcomm-sim --scale N: how much there is to do for each operation as ranks become many. One JSON object, on standard output.
#pragma once

#include "sim/scale_world.h"

namespace ftcomm::sim {

struct ScalePlan {
    int ranks = 0;
    int per_host = 8;   // ranks of a host see each other's processes end
    ScaleCost cost;
    bool fence_only = false;
};

// The exit status. Above the largest world that whole nodes are built for, and with fence_only, there is the fence alone.
int run_scale(const ScalePlan& plan);

// scale_fence.cc: the dissemination at the end of a barrier (collectives/fence.cc), one for each rank, without a node around it.
ScaleCount run_fence(int ranks, const ScaleCost& cost);

}  // namespace ftcomm::sim
