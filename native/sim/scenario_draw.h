// Parts of drawing a scenario that its kinds share.
#pragma once

#include "sim/scenario.h"

namespace ftcomm::sim {

// Some have all that windows need, which few have by chance: by itself, so that the other draws of a seed stay as they were.
bool is_for_windows(const Scenario& s);
void draw_network(Scenario& s, Random& r);
Scenario draw_replay(std::uint64_t seed);
void draw_checkpoints(Scenario& s);  // replay, before the faults
void draw_log_groups(Scenario& s);  // replay
void draw_shared_sums(Scenario& s);  // the same
void aim_at_checkpoints(Scenario& s);  // some of the faults

}  // namespace ftcomm::sim
