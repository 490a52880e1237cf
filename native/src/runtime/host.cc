#include "runtime/host.h"

#include <sched.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <thread>

#include "base/bytes.h"
#include "base/check.h"

namespace ftcomm {
namespace {

std::uint64_t hash_of(const std::string& text) { return hash64(std::as_bytes(std::span(text.data(), text.size()))); }

std::uint64_t inode(const char* path) {
    struct stat info{};
    return ::stat(path, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

HostIdentity identify_host(const std::string& boot, const std::string& node, const std::string& name) {
    HostIdentity id;
    // The boot id alone is the same in virtual machines that were started from one snapshot.
    id.host = hash_of(name.empty() ? boot + "/" + node : "named/" + name);
    id.machine = name.empty() ? hash_of("machine/" + node) : id.host;
    return id;
}

std::uint64_t log_owner(const HostIdentity& id, bool survives_boot) { return survives_boot ? id.machine : id.host; }

HostIdentity find_host(const std::string& name) {
    std::string boot;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    char node[256] = {};
    ::gethostname(node, sizeof node - 1);

    auto id = identify_host(boot, node, name);
    id.user = static_cast<std::uint32_t>(::getuid());
    id.pid = static_cast<std::int32_t>(::getpid());
    id.pid_namespace = inode("/proc/self/ns/pid");
    id.processes = hash_of(std::to_string(id.host) + "/" + boot + "/" + std::to_string(id.pid_namespace));
    // Abstract sockets belong to a network namespace.
    id.domain = hash_of(std::to_string(id.host) + "/" + boot + "/" + std::to_string(inode("/proc/self/ns/net")) + "/" +
                        std::to_string(id.user));
    id.kernel = hash_of(boot);
    static_assert(CPU_SETSIZE <= kMaxRanks);
    cpu_set_t set;
    if (::sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int i = 0; i < CPU_SETSIZE; ++i)
            if (CPU_ISSET(i, &set)) id.processors.add(i);
    } else {
        id.processors = RankSet::first(std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, CPU_SETSIZE));
    }
    return id;
}

std::uint64_t random64() {
    std::uint64_t value = 0;
    ssize_t n;
    do n = ::getrandom(&value, sizeof value, 0);
    while (n < 0 && errno == EINTR);
    FT_CHECK(n == sizeof value, "getrandom returned %zd", n);
    return value;
}

}  // namespace ftcomm
