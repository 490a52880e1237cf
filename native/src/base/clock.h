#pragma once

#include <cstdint>
#include <ctime>

namespace ftcomm {

// Nanoseconds of CLOCK_MONOTONIC: the same clock in all processes of a host, never set back, goes on while a process is
// stopped.
inline std::int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace ftcomm
