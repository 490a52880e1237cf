// The grammar of FTCOMM_FAULTS (failpoint.h), apart from what acts on it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace ftcomm::fault {

enum class Deed : std::uint8_t { Kill, Stop, Exit, Delay, Corrupt, Cut };

struct Fault {
    int rank = 0;
    int incarnation = 0;
    int point = 0;              // index in all_points()
    std::uint64_t nth = 1;      // for the point "step": the step's number
    std::uint64_t step = 0;     // passes count once this step has been reached
    bool has_step = false;
    Deed deed = Deed::Kill;
    double seconds = 0;         // Stop, Delay
    int argument = 0;           // Exit: code; Cut: rank
};

// All entries are checked, also those of other ranks; on an error `out` is untouched and the message names the bad part.
Status parse_faults(const std::string& spec, std::vector<Fault>* out);

// Point names close to `name`, nearest first, for the message about an unknown one.
std::vector<std::string> near_points(const std::string& name);

}  // namespace ftcomm::fault
