#pragma once

#include <string_view>

#include "base/failpoint.h"

namespace ftcomm::fault {

// Index in all_points(), or -1.
int find_point(std::string_view name);

}  // namespace ftcomm::fault
