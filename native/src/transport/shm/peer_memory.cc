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
#include "transport/ticket_word.h"

namespace ftcomm::shm {
namespace {

ssize_t copy(pid_t pid, std::uint64_t from, std::byte* to, std::size_t bytes) {
    const iovec local{to, bytes};
    const iovec remote{reinterpret_cast<void*>(static_cast<std::uintptr_t>(from)), bytes};  // NOLINT: another's address
    return ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
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
    std::uint64_t seen = 0;
    const std::uint64_t word = 1;
    // A filter on system calls refuses this as well.
    if (copy(::getpid(), reinterpret_cast<std::uintptr_t>(&word), reinterpret_cast<std::byte*>(&seen), sizeof seen) !=
            sizeof seen ||
        seen != word)
        return 0;
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

Transport::Read read_peer(const Instance& peer, const Transport::Remote& remote, const std::uint64_t& word, std::byte* to,
                          std::size_t bytes) {
    // By the thread that holds it: a process whose main thread has ended can be read, too.
    const auto holder = peer.liveness.load(std::memory_order_acquire);
    if (!is_held(holder)) return Transport::Read::Over;
    const auto n = copy(static_cast<pid_t>(holder & FUTEX_TID_MASK), remote.from, to, bytes);
    const int error = errno;
    const bool stands = ticket_stands(word, remote.ticket);
    // Held still: so the thread id was this peer's all the time.
    if (!is_held(peer.liveness.load(std::memory_order_seq_cst))) return Transport::Read::Over;
    if (n == static_cast<ssize_t>(bytes)) return stands ? Transport::Read::Done : Transport::Read::Over;
    if (n < 0 && error != EFAULT) return why_not(error);
    // Where the buffer was there may be nothing any more, because its operation is over: the ticket by itself says so.
    return stands ? Transport::Read::Refused : Transport::Read::Over;
}

}  // namespace ftcomm::shm
