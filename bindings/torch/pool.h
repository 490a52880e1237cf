// Threads that finish operations nobody waits for: they copy results out and mark futures, whose callbacks are user code.
#pragma once

#include <signal.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace ftcomm_torch {

// Signals are for the threads that the program knows: Ctrl-C must interrupt a waiting main thread. Around the start of another one.
class BlockedSignals {
public:
    BlockedSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    BlockedSignals(const BlockedSignals&) = delete;
    BlockedSignals& operator=(const BlockedSignals&) = delete;

private:
    sigset_t before_{};
};

// A task may block: a DDP hook's callback waits for the future of another all-reduce, which another task marks. So there is
// never a task without a thread: one is added whenever all are busy. None is started before the first task.
class Pool {
public:
    static Pool& get();
    void run(std::function<void()> task);

private:
    void work();

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::function<void()>> tasks_;
    std::size_t idle_ = 0;
};

}  // namespace ftcomm_torch
