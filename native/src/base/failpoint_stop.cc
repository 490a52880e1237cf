#include "base/failpoint_stop.h"

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace ftcomm::fault {

namespace {

// Runs in a copy of a multi-threaded process: system calls only.
[[noreturn]] void helper(pid_t parent, timespec left) {
    // Whoever kills the stopped process ends the helper with it; the second look catches a death before prctl.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    // The copies of sockets and pipes would hide the process's death from its peers.
#ifdef SYS_close_range
    const bool closed = syscall(SYS_close_range, 0u, ~0u, 0u) == 0;
#else
    const bool closed = false;
#endif
    if (!closed) {
        rlimit limit{};
        getrlimit(RLIMIT_NOFILE, &limit);
        for (rlim_t fd = 0; fd < limit.rlim_cur && fd < 65536; ++fd) close(static_cast<int>(fd));
    }
    // Both signals come from here, in this order: a continue can never overtake its stop.
    kill(parent, SIGSTOP);
    while (nanosleep(&left, &left) != 0) {}
    kill(parent, SIGCONT);
    _exit(0);
}

}  // namespace

void stop_for(double seconds) {
    timespec duration{};
    duration.tv_sec = static_cast<time_t>(seconds);
    duration.tv_nsec = std::lround((seconds - std::floor(seconds)) * 1e9) % 1'000'000'000;
    const pid_t self = getpid();
    // All signals blocked across the fork: the program's handlers must not run in the helper. Clone without a signal at
    // exit: no SIGCHLD, and no wait() of the program's, can meet a child that it does not know.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const long child = syscall(SYS_clone, 0L, 0L, 0L, 0L, 0L);
    if (child == 0) helper(self, duration);
    const int error = errno;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (child < 0) {
        std::fprintf(stderr, "ftcomm: failpoint: cannot stop this process: no helper: %s\n", std::strerror(error));
        return;
    }
    // Stopped in here; the helper's end comes after the continue.
    while (waitpid(static_cast<pid_t>(child), nullptr, __WALL) < 0 && errno == EINTR) {}
}

}  // namespace ftcomm::fault
