// One thread that waits for descriptors and timers (epoll, eventfd, timerfd) and runs their handlers. The sockets among them it lends to
// threads that look at them anyway.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "communicator/request.h"

namespace ftcomm {

// Contract:
// - Handlers, timers and posted functions run on the loop's thread, between lock() and unlock() of the engine: one pair
//   around each batch. What has to run without the engine (completions) belongs into the `unlock` callable, after its
//   own unlock. Handlers of sockets run in poll_sockets(), too.
// - add, modify, remove, at and cancel are called with the engine locked, from any thread, also from inside a handler
//   that removes itself or another: a removed handler never runs again, even when its event was already fetched.
// - post may be called from any thread, locked or not. Posted functions run in order. After stop() they are dropped.
// - Within one batch descriptors come first, then posted functions, then timers: a process that was stopped for a while
//   reads what has arrived before it looks at any deadline (M11), out of sockets that are lent, too.
class IoLoop {
public:
    using Handler = std::function<void(std::uint32_t events)>;  // EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP ...
    using TimerId = std::uint64_t;  // never 0

    IoLoop(std::function<void()> lock, std::function<void()> unlock);
    explicit IoLoop(std::mutex& engine);
    ~IoLoop();  // stop()
    IoLoop(const IoLoop&) = delete;
    IoLoop& operator=(const IoLoop&) = delete;

    Status start();  // makes the descriptors and the thread (all signals blocked); before any other call
    // Joins the thread; not from the thread itself and not with the engine locked. Handlers are dropped, descriptors
    // that were added stay their owners'. May be called twice.
    void stop();

    Status add(int fd, std::uint32_t events, Handler handler);  // level-triggered
    Status add_socket(int fd, std::uint32_t events, Handler handler);
    void modify(int fd, std::uint32_t events);
    void remove(int fd);  // before close(fd); unknown descriptors are ignored

    TimerId at(Time when, std::function<void()> fn);  // once, at or after `when` of now()
    void cancel(TimerId id);  // 0 and ids that have fired are ignored

    void post(std::function<void()> fn);

    // While they are lent the loop does not wake up for sockets; whoever has asked for them polls. Timers, posted functions and other
    // descriptors stay the loop's. With the engine locked.
    bool has_sockets() const { return watched_sockets_ > 0; }
    void lend_sockets(bool lent);
    bool sockets_lent() const { return lent_.load(std::memory_order_relaxed); }  // any thread
    bool poll_sockets();  // with the engine locked, not from a handler: runs the handlers of one batch; true: there was one
    bool sockets_ready() const;  // any thread, until close_sockets()
    void close_sockets();  // after stop()

    bool on_thread() const;
    static Time now();  // CLOCK_MONOTONIC, nanoseconds

    // In a child after fork: closes the loop's own descriptors. Takes no lock, frees nothing; afterwards only the
    // destructor may be called (or nothing).
    void close_in_child();

private:
    struct Registration {
        int fd;
        Handler handler;
    };
    struct Watched {
        std::uint64_t id;
        int epoll;
    };
    using Batch = std::array<epoll_event, 64>;

    Status add_to(int epoll, int fd, std::uint32_t events, Handler handler);
    void run_handler(const epoll_event& e);
    int poll_batch();

    void run();
    void arm_timer();
    void wake();
    void run_posted();
    void run_timers();
    bool stop_requested();

    std::function<void()> lock_, unlock_;
    int epoll_ = -1, event_ = -1, timer_ = -1;
    int sockets_ = -1;  // an epoll of their own, which the loop's waits for
    std::unique_ptr<std::thread> thread_;
    std::atomic<std::thread::id> thread_id_{};
    bool forked_ = false;
    std::atomic<bool> lent_{false};  // changes under the engine's lock

    // Under the engine's lock.
    bool polling_ = false;
    int watched_sockets_ = 0;
    std::uint64_t next_id_ = 16;  // ids below are the loop's own descriptors
    std::unordered_map<std::uint64_t, std::shared_ptr<Registration>> registrations_;
    std::unordered_map<int, Watched> by_fd_;
    std::map<std::pair<Time, TimerId>, std::function<void()>> timers_;
    std::unordered_map<TimerId, Time> timer_when_;
    Time armed_ = 0;

    std::mutex posted_mutex_;  // innermost: nothing else is taken under it
    std::vector<std::function<void()>> posted_;
    bool stopping_ = false;
};

}  // namespace ftcomm
