#include "transport/shm/peer_memory.h"

#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <string>

#include "base/bytes.h"
#include "transport/shm/liveness_word.h"

namespace ftcomm::shm {
namespace {

// Copies what it can of one range and then one word of another process, in this order.
ssize_t copy(pid_t pid, std::byte* to, std::size_t bytes, std::uint64_t from, std::uint64_t* word, std::uint64_t word_at) {
    const iovec local[2] = {{to, bytes}, {word, sizeof *word}};
    const iovec remote[2] = {{reinterpret_cast<void*>(static_cast<std::uintptr_t>(from)), bytes},  // NOLINT: another's address
                             {reinterpret_cast<void*>(static_cast<std::uintptr_t>(word_at)), sizeof *word}};
#if defined(__x86_64__)
    return ::process_vm_readv(pid, local, 2, remote, 2, 0);  // loads are not reordered with loads
#else
    const auto first = ::process_vm_readv(pid, local, 1, remote, 1, 0);
    if (first != static_cast<ssize_t>(bytes)) return first;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const auto second = ::process_vm_readv(pid, local + 1, 1, remote + 1, 1, 0);
    return second < 0 ? second : first + second;
#endif
}

int yama() {
    int scope = 0;  // no such file: no Yama
    std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
    return scope;
}

// It is on its way out, or this process may not (EPERM), can't any more (a filter that answers ENOSYS), lacks memory.
Transport::Read why_not(int error) { return error == ESRCH ? Transport::Read::Over : Transport::Read::Refused; }

std::uint64_t hash_of_line(const char* path, const std::string& start) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);)
        if (line.starts_with(start)) return hash64(std::as_bytes(std::span(line)));
    return 0;
}

}  // namespace

std::uint32_t memory_domain(std::uint64_t pid_namespace) {
    std::uint64_t seen = 0, word = 1, nobody = 2;
    const auto at = reinterpret_cast<std::uintptr_t>(&word);
    // A filter on system calls refuses this as well.
    if (copy(::getpid(), reinterpret_cast<std::byte*>(&seen), sizeof seen, at, &nobody, at) != 16 || seen != 1) return 0;
    if (::prctl(PR_GET_DUMPABLE) != 1) return 0;
    const int scope = yama();
    if (scope > 1) return 0;
    if (scope == 1 && ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY) != 0) return 0;
    struct stat user{};
    if (::stat("/proc/self/ns/user", &user) != 0) return 0;
    // Whoever has more capabilities can't be read by who has fewer; security modules go by their label.
    const std::uint64_t who[] = {pid_namespace,
                                 user.st_ino,
                                 ::getuid(),
                                 ::getgid(),
                                 hash_of_line("/proc/self/status", "CapPrm:"),
                                 hash_of_line("/proc/self/attr/current", "")};
    if (::getuid() != ::geteuid() || ::getgid() != ::getegid()) return 0;
    const auto hash = static_cast<std::uint32_t>(hash64(std::as_bytes(std::span(who))));
    return hash == 0 ? 1 : hash;
}

Transport::Read read_peer(const Instance& peer, const Transport::Remote& remote, std::byte* to, std::size_t bytes) {
    // By the thread that holds the word: a process whose main thread has ended can be read, too.
    const auto word = peer.liveness.load(std::memory_order_acquire);
    if (!is_held(word)) return Transport::Read::Over;
    std::uint64_t ticket = 0;
    const auto n = copy(static_cast<pid_t>(word & FUTEX_TID_MASK), to, bytes, remote.from, &ticket, remote.ticket_at);
    const int error = errno;
    // Held still: so the thread id was this peer's all the time. After what was copied: a load that acquires waits for none before it.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (!is_held(peer.liveness.load(std::memory_order_seq_cst))) return Transport::Read::Over;
    if (n == static_cast<ssize_t>(bytes + sizeof ticket))
        return ticket == remote.ticket ? Transport::Read::Done : Transport::Read::Over;
    if (n < 0 && error != EFAULT) return why_not(error);
    // Where the buffer was there may be nothing any more, because its operation is over: the ticket by itself says so.
    std::uint64_t nothing = 0;
    const auto m = copy(static_cast<pid_t>(word & FUTEX_TID_MASK), reinterpret_cast<std::byte*>(&ticket), sizeof ticket,
                        remote.ticket_at, &nothing, remote.ticket_at);
    if (m < 0 && errno != EFAULT) return why_not(errno);
    return m == 2 * sizeof ticket && ticket == remote.ticket ? Transport::Read::Refused : Transport::Read::Over;
}

}  // namespace ftcomm::shm
