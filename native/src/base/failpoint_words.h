#pragma once

#include "base/failpoint_spec.h"

namespace ftcomm::fault {

// The moment of a death that a fault is about to bring on, as a line in this rank's events file: no survivor can know it, and
// without it nobody could say how long detection took. Does nothing unless FTCOMM_EVENTS names a folder in which this
// rank and incarnation already writes events.
void last_words(const Fault& fault);

}  // namespace ftcomm::fault
