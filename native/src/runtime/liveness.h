// Evidence of death on one host (M5): a robust futex that the progress thread holds for as long as it lives.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstddef>
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

// Owned and used by one thread, which takes the place of the C library's robust list: that thread must not lock robust
// pthread mutexes.
class LivenessHolder {
public:
    // False: this kernel refuses robust lists; then deaths of this process are noticed by its pidfd.
    bool hold(std::atomic<std::uint32_t>& word);
    // Lets go without being dead. `word` becomes `last` and its waiters look.
    void release(std::uint32_t last);

private:
    struct List {  // struct robust_list_head of the kernel
        List* next;
        long offset;
        void* pending;
    };
    List head_{};
    List entry_{};  // only its `next` is used
    std::atomic<std::uint32_t>* word_ = nullptr;
};

}  // namespace ftcomm
