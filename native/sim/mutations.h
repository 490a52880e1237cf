// The protocol without one rule: which invariant breaks, and after how many seeds.
#pragma once

#include <string>

#include "sim/runner.h"

namespace ftcomm::sim {

bool is_rule(const std::string& name);

// Prints a table (Markdown, as in docs/protocol.md). 0 when every rule's absence was caught within plan.count seeds.
int table_of_mutations(const RunPlan& plan);

}  // namespace ftcomm::sim
