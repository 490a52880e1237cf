// What Instance::liveness says of a process: written by its owner (runtime/liveness.h) and by the kernel.
#pragma once

#include <linux/futex.h>

#include <cstdint>

namespace ftcomm {

// Values of Instance::liveness. Held: thread id | FUTEX_WAITERS, so that the kernel wakes a waiter when the thread dies
// and sets FUTEX_OWNER_DIED. It compares thread ids in the dying thread's own pid namespace: this works across those.
inline constexpr std::uint32_t kNotHeld = 0;
inline constexpr std::uint32_t kAnnounced = 1;              // with FUTEX_OWNER_DIED: all mailboxes have been rung
inline constexpr std::uint32_t kLeft = 0x3ffffffe;          // nobody needs it any more: no death
inline constexpr std::uint32_t kClosed = 0x3fffffff;        // closed without leaving: it takes part in nothing any more

inline bool is_held(std::uint32_t word) { return (word & FUTEX_WAITERS) != 0 && (word & FUTEX_OWNER_DIED) == 0; }
inline bool is_dead(std::uint32_t word) { return (word & FUTEX_OWNER_DIED) != 0; }

// It will never read again what others write to it.
inline bool is_over(std::uint32_t word) { return word != kNotHeld && !is_held(word); }

}  // namespace ftcomm
