// A reader's look at the word in which another process's ticket stands, or has fallen (C9).
#pragma once

#include <atomic>
#include <cstdint>

namespace ftcomm {

// After what was read under it: a load that acquires waits for none before it.
inline bool ticket_stands(const std::uint64_t& word, std::uint64_t ticket) {
    std::atomic_thread_fence(std::memory_order_acquire);
    return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire) == ticket;  // NOLINT: it only reads
}

}  // namespace ftcomm
