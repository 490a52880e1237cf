// A forked child has nothing of its parent's jobs (M7): no descriptor, no mapping, and no use of them.
#pragma once

#include <cstdint>

namespace ftcomm {

// Before a fork every registered engine is locked, so that the child finds it whole; parent and child unlock.
class ForkSensitive {
public:
    virtual void lock_for_fork() = 0;
    virtual void unlock_after_fork() = 0;   // in the parent
    virtual void close_in_child() = 0;      // in the child: closes descriptors and unlocks, frees nothing
    virtual ~ForkSensitive() = default;
};

namespace fork_guard {
void add(ForkSensitive* engine);
void remove(ForkSensitive* engine);
std::uint64_t generation();  // differs between a process and its forked children
}  // namespace fork_guard

}  // namespace ftcomm
