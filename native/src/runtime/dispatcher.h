// The thread that runs the user's code: completion callbacks and events. No other thread of the library does, so that a
// callback that waits (for Python's interpreter lock, a slow disk) never delays ticks, evidence or frames.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"

namespace ftcomm {

class Dispatcher {
public:
    ~Dispatcher() { stop(); }

    Status start();
    // In order; from any thread, also with the engine locked. After stop(): dropped.
    void post(std::function<void()> fn);
    // The same, but with what comes within the next 20 ms (or with the next post): events tell of a recovery, and whoever listens
    // would take the processor and the interpreter lock from it. They carry the time at which they happened.
    void post_soon(std::function<void()> fn);
    // Runs what has been posted, then ends the thread. Not from the thread itself unless it only wants to end it later:
    // then the thread is left to end by itself.
    void stop();
    bool on_thread() const;

private:
    struct Shared {
        std::mutex mutex;  // innermost
        std::condition_variable changed;
        std::vector<std::function<void()>> queue;
        bool urgent = false;
        bool stopping = false;
    };
    void push(std::function<void()> fn, bool urgent);
    static void run(const std::shared_ptr<Shared>& shared);

    std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
    std::thread thread_;
};

}  // namespace ftcomm
