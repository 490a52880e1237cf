// User threads in the engine: one of those that wait drives, so that a frame costs no hop between threads.
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "runtime/engine.h"

namespace ftcomm {
namespace {

constexpr Time kSpin = 500'000;   // ns; a peer's read of 4 MiB, after which it would have to wake who sleeps
constexpr Time kYield = 2'000'000;  // as long as the ranks that share a processor take to get each its turn, in most collectives
// How long a rank that is expected to come for its mail by itself is not woken for it.
constexpr Time kHeld = 20'000;
constexpr int kLooks = 4;
constexpr int kNear = 128;  // looks with the lock, 5 ns each
constexpr std::uint64_t kLittle = 64u << 10;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Engine::Wait Engine::sleep_passively(std::uint32_t seen, Time deadline) {
    ++passive_;
    unlock();
    int rc = futex_wait(changes_, seen, deadline);
    lock();
    --passive_;
    return rc == 0 ? Wait::Done : rc == EINTR ? Wait::Interrupted : Wait::Timeout;
}

Engine::Wait Engine::wait_change(std::uint32_t seen, Time deadline) {
    lock();
    ++inside_;
    auto result = stopped() ? Wait::Closed : changes() != seen ? Wait::Done : sleep_passively(seen, deadline);
    if (--inside_ == 0 && stopped()) notify();
    unlock();
    return result;
}

Engine::Wait Engine::wait(const RequestPtr& request, Time deadline, Time now, bool held) {
    auto done = [&] { return request->done.load(std::memory_order_acquire); };
    if (!held && done()) return Wait::Done;
    lock_urgently();
    const auto result = wait_locked(request, deadline, now);
    unlock();
    return result;
}

Engine::Wait Engine::wait_locked(const RequestPtr& request, Time deadline, Time now) {
    auto done = [&] { return request->done.load(std::memory_order_acquire); };
    ++inside_;
    Wait result;
    for (;;) {
        result = done() ? Wait::Done : stopped() ? Wait::Closed : request->alarmed ? Wait::Alarmed : Wait::Timeout;
        if (result != Wait::Timeout) break;
        if (!driving_) {
            driving_ = true;
            hold_bells();
            burst_.enter(now != 0 ? now : IoLoop::now());
            if (burst_.on() && parts_.own_processor && shm_ != nullptr) shm_->watch(true);
            result = drive(request, deadline);
            ring_held();
            driving_ = false;
            hand_back();
            if (result != Wait::Done && done()) result = Wait::Done;  // it has looked, too
            break;
        }
        ring_held();
        result = sleep_passively(changes(), deadline);
        if (result != Wait::Done) {
            if (done()) result = Wait::Done;
            break;
        }
    }
    if (--inside_ == 0 && stopped()) notify();
    return result;
}

Engine::Wait Engine::drive(const RequestPtr& request, Time deadline) {
    auto done = [&] { return request->done.load(std::memory_order_acquire); };
    auto& bell = mailbox_->bell[shm::kDriver - 1];
    tell_changes();  // of its own post: else it would wake itself
    if (mailbox_->sleeper.load(std::memory_order_relaxed) != shm::kAwake)  // only threads with the lock say that somebody sleeps
        mailbox_->sleeper.store(shm::kAwake, std::memory_order_seq_cst);
    bool lingered = false;
    for (;;) {
        const bool held = holds_bells();
        bool did = poll();
        if (done()) return Wait::Done;
        if (stopped()) return Wait::Closed;
        if (request->alarmed) return Wait::Alarmed;
        if (did && (deadline == 0 || IoLoop::now() < deadline)) {
            if (held || has_work()) ring_held();  // the next look may be long in coming
            unlock_as_driver();
            // A mutex is not fair: whoever has just let go would take it again and again.
            give_way();
            lock();
            lingered = false;
            continue;
        }
        if (!lingered && looks_on()) continue;
        auto now = IoLoop::now();
        if (deadline != 0 && now >= deadline) {
            poll(true);  // the answer may be there
            return done() ? Wait::Done : Wait::Timeout;
        }
        if (!lingered && may_linger(now)) {
            take_cell_replies();
            const bool expects = holds_bells();
            lingered = !expects;
            const auto rung = bell.load(std::memory_order_acquire);
            driver_sleeps_ = true;  // as good as: others say what they have for it
            lend_sockets(true);
            unlock_as_driver();
            linger(*request, rung, now, expects && (deadline == 0 || now + kHeld < deadline) ? now + kHeld : deadline);
            lock();
            driver_sleeps_ = false;
            if (expects) ring_held();
            continue;
        }
        take_cell_replies();
        ring_held();
        auto rung = bell.load(std::memory_order_acquire);
        if (!sleep_as(shm::kDriver)) continue;
        driver_sleeps_ = true;
        lend_sockets(false);  // the io thread looks at once whether something has come meanwhile
        unlock_as_driver();
        int rc = futex_wait(bell, rung, deadline);
        if (!parts_.own_processor) turns_.slept(now, IoLoop::now());
        lock();
        driver_sleeps_ = false;
        mailbox_->sleeper.store(shm::kAwake, std::memory_order_seq_cst);
        lingered = false;
        if (done()) return Wait::Done;
        if (rc == EINTR) return Wait::Interrupted;
    }
}

// Most of what is watched for comes within half a microsecond. To let go of the lock and take it again is a tenth of that, as is each look at the
// clock. A pause instruction is as long, too.
bool Engine::looks_on() {
    if (shm_ == nullptr || !shm_->watches()) return false;
    for (int i = 0; i < kNear && contenders_.load(std::memory_order_relaxed) == 0; ++i)
        if (has_mail()) return true;
    return false;
}

// What a driver waits for often comes at once: to sleep and be woken costs both sides more. On a processor of its own it looks; on one
// that it shares, whoever it waits for may need that processor, so it hands it on each time, which is a switch without a wake-up. Where
// somebody else computes there, it would get the processor back when that one's turn is over, in milliseconds; who sleeps and is woken
// gets it at once. So one that had to wait for it sleeps for a while.
void Engine::linger(const Request& request, std::uint32_t rung, Time now, Time deadline) {
    auto end = now + (parts_.own_processor ? kSpin : kYield);
    if (deadline != 0) end = std::min(end, deadline);
    const auto& bell = mailbox_->bell[shm::kDriver - 1];
    const auto nothing_new = [&] {
        return !has_mail() && !request.done.load(std::memory_order_acquire) && bell.load(std::memory_order_acquire) == rung;
    };
    turns_.begin_wait(now);
    while (nothing_new() && !sockets_ready() && now < end) {
        if (parts_.own_processor) {
            for (int i = 0; i < 16 && nothing_new(); ++i) relax();
            now = IoLoop::now();
            continue;
        }
        ::sched_yield();
        const auto before = std::exchange(now, IoLoop::now());
        if (!turns_.took(before, now)) break;
    }
    turns_.end_wait();
}

// The progress thread sleeps on the bell already, or is about to look at everything: either way only `sleeper` has to say
// so, which costs no switch to it. In a burst not even that: the mailbox goes on saying that somebody is awake.
void Engine::hand_back() {
    if (passive_ > 0) notify();  // one of them drives
    // What is there is of the others' next operation, most likely, as is what comes until this one begins its own.
    int looks = kLooks;
    const auto may_look = [&] { return looks > 0 && progress_sleeps_ && !stopped() && has_mail() && !has_work(); };
    const auto look = [&] {
        for (; may_look(); --looks) poll_rings(kLittle);
    };
    if (!burst_.on()) look();
    if (burst_.leave(polled_at_ != 0 ? polled_at_ : IoLoop::now(), may_hold_bells())) shm::ring_progress(*mailbox_);
    if (burst_.on()) return;
    lend_sockets(false);
    while (progress_sleeps_ && !sleep_as(shm::kProgress)) {
        if (!may_look()) return shm::ring_progress(*mailbox_);
        look();
    }
}

}  // namespace ftcomm
