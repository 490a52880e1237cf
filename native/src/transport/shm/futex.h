// The futex system calls. Words may lie in shared memory; time-outs are absolute CLOCK_MONOTONIC nanoseconds, 0: none.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

namespace ftcomm {

void futex_wake(std::atomic<std::uint32_t>& word, int count);

// 0: woken, or the word did not hold `expected`. Else ETIMEDOUT or EINTR.
int futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t deadline);

struct FutexWord {
    std::atomic<std::uint32_t>* word;
    std::uint32_t expected;
};
inline constexpr std::size_t kMaxFutexWords = 128;
// Until one of at most kMaxFutexWords words changes or is woken. 0, ETIMEDOUT, EINTR.
int futex_wait_any(std::span<const FutexWord> words, std::int64_t deadline);
// Whether this kernel (and its seccomp filter) has futex_waitv. Without it futex_wait_any waits on the first word only, the
// own bell: deaths are then noticed at the next tick or by pidfd.
bool has_futex_waitv();

}  // namespace ftcomm
