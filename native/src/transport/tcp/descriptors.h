// Links between hosts are one descriptor each, and many systems let a process have 1,024.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace ftcomm {

// Room for so many more connections, and for strangers beside them. The soft limit (`ulimit -n`) is raised where it is too low, to
// the hard one at most; where that is too low, too, the error says what to do. A job would else find out by its timeout.
Status make_room_for(std::size_t connections);

}  // namespace ftcomm
