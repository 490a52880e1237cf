// Node events as lines of events.jsonl.
#pragma once

#include <string>

#include "communicator/node.h"

namespace ftcomm {

struct EventSource {
    std::string job;
    int rank = 0;
    std::uint32_t incarnation = 0;
};
// A system clock reading and a monotonic one are part of the line. event nullptr: a log line.
std::string event_json(const EventSource& source, const NodeEvent* event, const std::string& line);

}  // namespace ftcomm
