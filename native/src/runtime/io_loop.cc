#include "runtime/io_loop.h"

#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "base/clock.h"
#include "runtime/thread.h"

namespace ftcomm {
namespace {

constexpr int kRounds = 16;  // for the sockets of as many ranks as there may be; who always has more does not keep the loop
constexpr std::uint64_t kEventId = 1, kTimerId = 2, kSocketsId = 3;

Status system_error(const char* what) {
    return Status::error(Code::System, std::string("the I/O thread could not be started: ") + what +
                                           " failed: " + std::strerror(errno) + " (check the limits on open files and threads)");
}

void close_fd(int& fd) {
    if (fd >= 0) ::close(fd);
    fd = -1;
}

}  // namespace

IoLoop::IoLoop(std::function<void()> lock, std::function<void()> unlock) : lock_(std::move(lock)), unlock_(std::move(unlock)) {}

IoLoop::IoLoop(std::mutex& engine) : IoLoop([&engine] { engine.lock(); }, [&engine] { engine.unlock(); }) {}

IoLoop::~IoLoop() {
    if (forked_) {
        // The thread exists only in the parent: its handle here can be neither joined nor detached.
        static_cast<void>(thread_.release());
        return;
    }
    stop();
    close_sockets();
}

void IoLoop::close_sockets() { close_fd(sockets_); }

Time IoLoop::now() { return monotonic_ns(); }

Status IoLoop::start() {
    FT_CHECK(thread_ == nullptr && epoll_ < 0, "the loop was started twice");
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ < 0) return system_error("epoll_create1");
    event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0) return system_error("eventfd");
    timer_ = ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (timer_ < 0) return system_error("timerfd_create");
    sockets_ = ::epoll_create1(EPOLL_CLOEXEC);
    if (sockets_ < 0) return system_error("epoll_create1");
    for (auto [fd, id] : {std::pair{event_, kEventId}, std::pair{timer_, kTimerId}, std::pair{sockets_, kSocketsId}}) {
        epoll_event e{};
        e.events = EPOLLIN;
        e.data.u64 = id;
        if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e) != 0) return system_error("epoll_ctl");
    }
    thread_ = std::make_unique<std::thread>();
    return start_thread(thread_.get(), "ftcomm-io", [this] { run(); });
}

void IoLoop::stop() {
    if (forked_) return;
    {
        std::lock_guard guard(posted_mutex_);
        stopping_ = true;
    }
    if (thread_ != nullptr && thread_->joinable()) {
        FT_CHECK(!on_thread(), "the loop cannot stop itself from its own thread");
        wake();
        thread_->join();
    }
    std::vector<std::function<void()>> dropped;
    {
        std::lock_guard guard(posted_mutex_);
        dropped.swap(posted_);
    }
    registrations_.clear();
    by_fd_.clear();
    timers_.clear();
    timer_when_.clear();
    close_fd(epoll_);
    close_fd(event_);
    close_fd(timer_);
}

Status IoLoop::add(int fd, std::uint32_t events, Handler handler) { return add_to(epoll_, fd, events, std::move(handler)); }

Status IoLoop::add_socket(int fd, std::uint32_t events, Handler handler) {
    return add_to(sockets_, fd, events, std::move(handler));
}

Status IoLoop::add_to(int epoll, int fd, std::uint32_t events, Handler handler) {
    FT_CHECK(by_fd_.count(fd) == 0, "descriptor %d is already in the loop", fd);
    const auto id = next_id_++;
    epoll_event e{};
    e.events = events;
    e.data.u64 = id;
    if (epoll < 0 || ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e) != 0) {
        return Status::error(Code::System, std::string("a descriptor could not be watched: ") + std::strerror(errno));
    }
    registrations_.emplace(id, std::make_shared<Registration>(Registration{fd, std::move(handler)}));
    by_fd_.emplace(fd, Watched{id, epoll});
    watched_sockets_ += epoll == sockets_ ? 1 : 0;
    return {};
}

void IoLoop::modify(int fd, std::uint32_t events) {
    const auto it = by_fd_.find(fd);
    if (it == by_fd_.end() || epoll_ < 0) return;
    epoll_event e{};
    e.events = events;
    e.data.u64 = it->second.id;
    FT_CHECK(::epoll_ctl(it->second.epoll, EPOLL_CTL_MOD, fd, &e) == 0, "descriptor %d: %s", fd, std::strerror(errno));
}

void IoLoop::remove(int fd) {
    const auto it = by_fd_.find(fd);
    if (it == by_fd_.end()) return;
    const auto [id, epoll] = it->second;
    if (epoll_ >= 0) ::epoll_ctl(epoll, EPOLL_CTL_DEL, fd, nullptr);
    watched_sockets_ -= epoll == sockets_ ? 1 : 0;
    registrations_.erase(id);
    by_fd_.erase(it);
}

void IoLoop::run_handler(const epoll_event& e) {
    const auto it = registrations_.find(e.data.u64);
    if (it == registrations_.end()) return;
    const auto keep = it->second;  // the handler may remove itself
    keep->handler(e.events);
}

void IoLoop::lend_sockets(bool lent) {
    if (lent == sockets_lent() || sockets_ < 0 || epoll_ < 0) return;
    lent_.store(lent, std::memory_order_relaxed);
    epoll_event e{};
    e.events = lent ? 0u : std::uint32_t{EPOLLIN};
    e.data.u64 = kSocketsId;
    FT_CHECK(::epoll_ctl(epoll_, EPOLL_CTL_MOD, sockets_, &e) == 0, "%s", std::strerror(errno));
}

bool IoLoop::poll_sockets() { return poll_batch() > 0; }

int IoLoop::poll_batch() {
    FT_CHECK(!polling_, "sockets are polled by one of their handlers");
    Batch events{};
    const int n = ::epoll_wait(sockets_, events.data(), static_cast<int>(events.size()), 0);
    polling_ = true;
    for (int i = 0; i < n; ++i) run_handler(events[static_cast<std::size_t>(i)]);
    polling_ = false;
    return n;
}

bool IoLoop::sockets_ready() const {
    epoll_event e{};
    return ::epoll_wait(sockets_, &e, 1, 0) > 0;
}

IoLoop::TimerId IoLoop::at(Time when, std::function<void()> fn) {
    const auto id = next_id_++;
    timers_.emplace(std::pair{when, id}, std::move(fn));
    timer_when_.emplace(id, when);
    arm_timer();
    return id;
}

void IoLoop::cancel(TimerId id) {
    const auto it = timer_when_.find(id);
    if (it == timer_when_.end()) return;
    timers_.erase({it->second, id});
    timer_when_.erase(it);  // a wake-up that is too early does no harm: the timer is armed anew then
}

void IoLoop::arm_timer() {
    if (timer_ < 0 || timers_.empty()) return;
    const Time first = timers_.begin()->first.first;
    if (armed_ != 0 && armed_ <= first) return;
    armed_ = first > 0 ? first : 1;  // 0 would disarm
    itimerspec spec{};
    spec.it_value.tv_sec = armed_ / 1'000'000'000;
    spec.it_value.tv_nsec = armed_ % 1'000'000'000;
    FT_CHECK(::timerfd_settime(timer_, TFD_TIMER_ABSTIME, &spec, nullptr) == 0, "%s", std::strerror(errno));
}

void IoLoop::post(std::function<void()> fn) {
    std::lock_guard guard(posted_mutex_);
    if (stopping_) return;
    posted_.push_back(std::move(fn));
    // Under the mutex: stop() closes the descriptor only after it has set stopping_ under it.
    if (posted_.size() == 1) wake();
}

void IoLoop::wake() {
    const std::uint64_t one = 1;
    if (event_ >= 0) static_cast<void>(!::write(event_, &one, sizeof one));
}

bool IoLoop::on_thread() const { return thread_id_.load() == std::this_thread::get_id(); }

void IoLoop::run_posted() {
    std::vector<std::function<void()>> batch;
    {
        std::lock_guard guard(posted_mutex_);
        if (stopping_) return;
        batch.swap(posted_);
    }
    for (auto& fn : batch) fn();
}

void IoLoop::run_timers() {
    // Timers that a timer sets for "now" wait for the next round, so that descriptors get their turn.
    const Time limit = now();
    const auto newest = next_id_;
    while (!timers_.empty()) {
        auto it = timers_.begin();
        while (it != timers_.end() && it->first.first <= limit && it->first.second >= newest) ++it;
        if (it == timers_.end() || it->first.first > limit) break;
        auto fn = std::move(it->second);
        timer_when_.erase(it->first.second);
        timers_.erase(it);
        fn();
    }
    armed_ = 0;
    arm_timer();
}

bool IoLoop::stop_requested() {
    std::lock_guard guard(posted_mutex_);
    return stopping_;
}

void IoLoop::run() {
    thread_id_.store(std::this_thread::get_id());
    int deferred = 0;
    Batch events{};
    for (;;) {
        const int n = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), -1);
        if (n < 0) {
            FT_CHECK(errno == EINTR, "epoll_wait: %s", std::strerror(errno));
            continue;
        }
        lock_();
        if (stop_requested()) {
            unlock_();
            return;
        }
        bool posted = false, timers = false, sockets = false;
        for (int i = 0; i < n; ++i) {
            const auto& e = events[static_cast<std::size_t>(i)];
            std::uint64_t value = 0;
            if (e.data.u64 == kEventId) {
                static_cast<void>(!::read(event_, &value, sizeof value));
                posted = true;
            } else if (e.data.u64 == kTimerId) {
                static_cast<void>(!::read(timer_, &value, sizeof value));
                timers = true;
            } else if (e.data.u64 == kSocketsId) {
                sockets = true;
            } else {
                run_handler(e);
            }
        }
        // Lent, perhaps since the event was fetched: who has them polls. But whatever has arrived comes before any deadline (M11): also
        // what was not looked at because they were lent then.
        if (timers || posted || (sockets && !sockets_lent()))
            for (int i = 0; i < kRounds && poll_batch() == static_cast<int>(Batch{}.size());) ++i;
        if (posted) run_posted();
        // With a full batch there may be more to read: the deadlines wait for it, but not for ever.
        if (timers && (n < static_cast<int>(events.size()) || ++deferred > 4)) {
            deferred = 0;
            run_timers();
        } else if (timers) {
            armed_ = 0;
            arm_timer();
        }
        unlock_();
    }
}

void IoLoop::close_in_child() {
    forked_ = true;
    close_fd(epoll_);
    close_fd(event_);
    close_fd(timer_);
    close_fd(sockets_);
}

}  // namespace ftcomm
