// Evidence of death on one host (M5): a robust futex that the progress thread holds for as long as it lives.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/shm/liveness_word.h"

namespace ftcomm {

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
