#pragma once

namespace ftcomm::fault {

// Stops this whole process (SIGSTOP) and has it continued after `seconds` by a helper process that then ends.
void stop_for(double seconds);

}  // namespace ftcomm::fault
