#include "base/host_info.h"

#include <fcntl.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include "base/f16c.h"
#include "base/json.h"
#include "base/reduce_kernels.h"

namespace ftcomm {

namespace {

// The numbers are the same on all architectures; older C libraries lack the names.
constexpr long kPidfdOpen = 434;
constexpr long kFutexWaitv = 449;

struct FutexWaiter {  // struct futex_waitv of linux/futex.h, since 5.16
    std::uint64_t value;
    std::uint64_t address;
    std::uint32_t flags;
    std::uint32_t reserved;
};
constexpr std::uint32_t kFutex32 = 2;

bool try_pidfd_open() {
    const long fd = syscall(kPidfdOpen, getpid(), 0);
    if (fd < 0) return false;
    close(static_cast<int>(fd));
    return true;
}

// A wait for a word that already differs comes back at once, with EAGAIN where the call works.
bool try_futex_waitv() {
    std::uint32_t word = 0;
    FutexWaiter waiter{1, reinterpret_cast<std::uintptr_t>(&word), kFutex32, 0};
    return syscall(kFutexWaitv, &waiter, 1, 0, nullptr, 0) < 0 && errno == EAGAIN;
}

bool try_process_vm_readv() {
    std::uint32_t from = 0x5eed, to = 0;
    iovec local{&to, sizeof to}, remote{&from, sizeof from};
    return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == sizeof to && to == from;
}

bool try_memfd_create() {
    const int fd = memfd_create("ftcomm-probe", MFD_CLOEXEC);
    if (fd < 0) return false;
    close(fd);
    return true;
}

int read_ptrace_scope() {
    const int fd = open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    char text[8] = {};
    const ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    return n > 0 ? std::atoi(text) : -1;
}

std::vector<std::string> cpu_features() {
    std::vector<std::string> out;
#if defined(__x86_64__)
#define FTCOMM_FEATURE(name) \
    if (__builtin_cpu_supports(name)) out.push_back(name)
    FTCOMM_FEATURE("sse4.2");
    FTCOMM_FEATURE("avx");
    if (has_f16c()) out.push_back("f16c");
    FTCOMM_FEATURE("fma");
    FTCOMM_FEATURE("avx2");
    FTCOMM_FEATURE("avx512f");
    FTCOMM_FEATURE("avx512bw");
    FTCOMM_FEATURE("avx512dq");
    FTCOMM_FEATURE("avx512vl");
#undef FTCOMM_FEATURE
#elif defined(__aarch64__)
    const unsigned long capabilities = getauxval(AT_HWCAP);
    if ((capabilities & (1ul << 1)) != 0) out.push_back("asimd");
    if ((capabilities & (1ul << 7)) != 0) out.push_back("crc32");
    if ((capabilities & (1ul << 8)) != 0) out.push_back("atomics");
    if ((capabilities & (1ul << 10)) != 0) out.push_back("asimdhp");
    if ((capabilities & (1ul << 22)) != 0) out.push_back("sve");
#endif
    return out;
}

}  // namespace

HostInfo probe_host() {
    HostInfo info;
    utsname name{};
    if (uname(&name) == 0) {
        info.kernel = std::string(name.sysname) + " " + name.release;
        info.machine = name.machine;
    }
    info.cpu_features = cpu_features();
    info.reduce_kernels = reduce_kernels().name;
    info.pidfd_open = try_pidfd_open();
    info.futex_waitv = try_futex_waitv();
    info.process_vm_readv = try_process_vm_readv();
    info.memfd_create = try_memfd_create();
    info.ptrace_scope = read_ptrace_scope();
    return info;
}

std::string to_json(const HostInfo& info) {
    return JsonObject()
        .add("kernel", info.kernel)
        .add("machine", info.machine)
        .add("cpu_features", info.cpu_features)
        .add("reduce_kernels", info.reduce_kernels)
        .add("pidfd_open", info.pidfd_open)
        .add("futex_waitv", info.futex_waitv)
        .add("process_vm_readv", info.process_vm_readv)
        .add("memfd_create", info.memfd_create)
        .add("ptrace_scope", info.ptrace_scope)
        .text();
}

}  // namespace ftcomm
