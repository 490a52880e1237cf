// Threads of the library take no signals: handlers run where the user expects them, and waits there see EINTR.
#pragma once

#include <signal.h>

namespace ftcomm {

// While it lives, threads that are started inherit a full mask.
class BlockSignals {
public:
    BlockSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    BlockSignals(const BlockSignals&) = delete;
    BlockSignals& operator=(const BlockSignals&) = delete;

private:
    sigset_t before_;
};

}  // namespace ftcomm
