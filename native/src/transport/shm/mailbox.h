// Leaving word for a process and waking the one thread of it that sleeps.
#pragma once

#include "transport/shm/futex.h"
#include "transport/shm/layout.h"

namespace ftcomm::shm {

inline void wake(Mailbox& box) {
    if (box.sleeper.load(std::memory_order_seq_cst) == kAwake) return;
    auto who = box.sleeper.exchange(kAwake, std::memory_order_seq_cst);
    if (who != kProgress && who != kDriver) return;  // somebody else was faster
    auto& bell = box.bell[who - 1];
    bell.fetch_add(1, std::memory_order_release);
    futex_wake(bell, 1);
}

inline void leave(std::atomic<std::uint64_t>* words, int slot) {
    words[slot / 64].fetch_or(std::uint64_t{1} << (slot % 64), std::memory_order_seq_cst);
}

inline void post(Mailbox& box, std::atomic<std::uint64_t>* words, int slot) {
    leave(words, slot);
    wake(box);
}

// Whether what was left there is still unread.
inline bool is_left(const std::atomic<std::uint64_t>* words, int slot) {
    return (words[slot / 64].load(std::memory_order_seq_cst) >> (slot % 64) & 1) != 0;
}

// Wakes the progress thread, whoever the sleeper is.
inline void ring_progress(Mailbox& box) {
    auto& bell = box.bell[kProgress - 1];
    bell.fetch_add(1, std::memory_order_release);
    futex_wake(bell, 1);
}

inline bool has_mail(const Mailbox& box, int world_size) {
    for (int i = 0; i < (world_size + 63) / 64; ++i)
        if ((box.pending[i].load(std::memory_order_seq_cst) | box.writable[i].load(std::memory_order_seq_cst)) != 0) return true;
    return false;
}

}  // namespace ftcomm::shm
