// Threads that finish operations nobody waits for: they copy results out and mark futures, whose callbacks are user code.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace ftcomm_torch {

// A task may block: a DDP hook's callback waits for the future of another all-reduce, which another task marks. So there is
// never a task without a thread: one is added whenever all are busy. None is started before the first task.
class Pool {
public:
    static Pool& get();
    void run(std::function<void()> task);
    // Until there is no task left, or that long: before the interpreter ends, which ends a thread that it meets in a callback, in the
    // middle of C++.
    void settle(double seconds);

private:
    bool start();
    void work();

    std::mutex mutex_;
    std::condition_variable wake_, settled_;
    std::deque<std::function<void()>> tasks_;
    std::size_t idle_ = 0, threads_ = 0;
};

}  // namespace ftcomm_torch
