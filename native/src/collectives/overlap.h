// Memory that is input and output at once.
#pragma once

#include <cstddef>

#include "communicator/request.h"

namespace ftcomm {

// An error where a result would be written over what is still to be read: sums and messages of other ranks may come in any order. What
// a rank gives to itself may stay where it is. (Gathers have put their own block in its place before anything else is written.)
Status check_overlap(const OpDesc& desc, int rank, std::size_t size);

}  // namespace ftcomm
