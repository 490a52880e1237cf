#include "runtime/start_watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/joined.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace ftcomm {

void StartWatch::begin(IoLoop& loop, const HostIdentity& own, const std::vector<Address>& founders,
                       std::function<void()> on_gone) {
    loop_ = &loop;
    for (const auto& a : founders) {
        if (a.processes != own.processes || a.pid == own.pid || a.pid <= 0) continue;
        int fd = static_cast<int>(::syscall(SYS_pidfd_open, a.pid, 0));
        if (fd < 0) {
            if (errno == ESRCH) gone_.add(a.rank);
            continue;  // no pidfd here: the timeout of the start is left
        }
        auto status = loop.add(fd, EPOLLIN, [this, fd, rank = a.rank, on_gone](std::uint32_t) {
            loop_->remove(fd);  // stays readable
            gone_.add(rank);
            on_gone();
        });
        if (status) founders_.push_back({a.rank, fd});
        else ::close(fd);
    }
    if (!gone_.empty()) on_gone();
}

void StartWatch::end() {
    for (const auto& f : founders_) {
        loop_->remove(f.pidfd);
        ::close(f.pidfd);
    }
    founders_.clear();
}

Status StartWatch::failure() const {
    const auto who = joined(gone_.list(), ", ", [](int rank) { return "rank " + std::to_string(rank); });
    auto status =
        Status::error(Code::PeerFailure, who + " ended while the job started: see its own output, and start the job again");
    status.ranks = gone_.list();
    return status;
}

void StartWatch::close_in_child() {
    for (const auto& f : founders_) ::close(f.pidfd);
}

}  // namespace ftcomm
