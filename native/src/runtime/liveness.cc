#include "runtime/liveness.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "transport/shm/futex.h"

namespace ftcomm {

bool LivenessHolder::hold(std::atomic<std::uint32_t>& word) {
    word_ = &word;
    head_.next = &entry_;
    entry_.next = &head_;
    head_.offset = reinterpret_cast<char*>(&word) - reinterpret_cast<char*>(&entry_);
    head_.pending = nullptr;
    bool ok = ::syscall(SYS_set_robust_list, &head_, sizeof head_) == 0;
    // Held also where the kernel would not mark it: the others then know at least that this process is up.
    word.store(static_cast<std::uint32_t>(::syscall(SYS_gettid)) | FUTEX_WAITERS, std::memory_order_release);
    return ok;
}

void LivenessHolder::release(std::uint32_t last) {
    if (word_ == nullptr) return;
    // This object may go before the thread does: the kernel must not find it at the thread's exit.
    ::syscall(SYS_set_robust_list, nullptr, sizeof head_);
    word_->store(last, std::memory_order_release);
    futex_wake(*word_, INT_MAX);
    word_ = nullptr;
}

}  // namespace ftcomm
