#include "transport/shm/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "base/check.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

namespace ftcomm {
namespace {

// As in linux/futex.h since 5.16; own names, so that older headers do.
constexpr std::uint32_t kSize32 = 2;
struct WaitEntry {
    std::uint64_t value, address;
    std::uint32_t flags, reserved;
};

timespec to_timespec(std::int64_t t) {
    t = std::max<std::int64_t>(t, 0);
    return {static_cast<time_t>(t / 1'000'000'000), static_cast<long>(t % 1'000'000'000)};
}

std::uint32_t* raw(std::atomic<std::uint32_t>& word) { return reinterpret_cast<std::uint32_t*>(&word); }

int result(long rc) {
    if (rc >= 0) return 0;
    if (errno == EAGAIN) return 0;  // the word had changed already
    FT_CHECK(errno == ETIMEDOUT || errno == EINTR, "futex wait failed with errno %d", errno);
    return errno;
}

}  // namespace

void futex_wake(std::atomic<std::uint32_t>& word, int count) {
    ::syscall(SYS_futex, raw(word), FUTEX_WAKE, count, nullptr, nullptr, 0);
}

int futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t deadline) {
    auto until = to_timespec(deadline);
    // WAIT_BITSET is the variant with an absolute time-out; without a clock flag it is CLOCK_MONOTONIC.
    return result(::syscall(SYS_futex, raw(word), FUTEX_WAIT_BITSET, expected, deadline != 0 ? &until : nullptr, nullptr,
                            FUTEX_BITSET_MATCH_ANY));
}

int futex_wait_any(std::span<const FutexWord> words, std::int64_t deadline) {
    if (words.size() == 1 || !has_futex_waitv()) return futex_wait(*words[0].word, words[0].expected, deadline);
    FT_CHECK(words.size() <= kMaxFutexWords, "%zu words to wait for", words.size());
    WaitEntry entries[kMaxFutexWords];
    for (std::size_t i = 0; i < words.size(); ++i)
        entries[i] = {words[i].expected, reinterpret_cast<std::uint64_t>(raw(*words[i].word)), kSize32, 0};
    auto until = to_timespec(deadline);
    return result(::syscall(SYS_futex_waitv, entries, static_cast<unsigned>(words.size()), 0u, deadline != 0 ? &until : nullptr,
                            CLOCK_MONOTONIC));
}

bool has_futex_waitv() {
    // An empty list is EINVAL where the call exists; ENOSYS, or what a seccomp filter says, where it does not.
    static const bool has = ::syscall(SYS_futex_waitv, nullptr, 0u, 0u, nullptr, CLOCK_MONOTONIC) == -1 && errno == EINVAL;
    return has;
}

}  // namespace ftcomm
