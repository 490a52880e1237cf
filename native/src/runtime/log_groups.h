// Which messages are logged (option log): all, those between hosts, or those between groups that are given.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace ftcomm {

struct LogGroups {
    bool inter_host = false;
    std::vector<std::int32_t> of;  // the group of each rank; empty: all messages are logged, or those between hosts
    std::string text = "all";  // equal texts mean the same

    // "all", "inter-host", or groups as in "0,1/2,3": who is in none is a group of its own.
    static Status parse(const std::string& text, int world_size, LogGroups* out);
};

}  // namespace ftcomm
