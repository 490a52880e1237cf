// Whether the rank's threads go from one operation straight to the next.
//
// In between they are out of the engine for some microseconds. To wake the progress thread for what comes in that time costs
// its sender a system call, and this rank a switch or a wait for the lock, for every operation. In a burst it is not woken: it
// looks now and then, and what comes waits for the next operation or for that. A burst is over when a look finds that none has
// been begun since the last one, or that half of those that were came after a pause. One pause is none: a rank that shares its
// processor is made to pause.
#pragma once

#include <algorithm>
#include <atomic>
#include <utility>

#include "communicator/request.h"

namespace ftcomm {

class Burst {
public:
    bool on() const { return on_; }
    // A thread begins to wait for an operation, and looks for mail itself; and it has left.
    void enter(Time now) {
        const bool quickly = now - passed_at_.exchange(-now, std::memory_order_relaxed) < kQuickly;
        quick_ = quickly ? quick_ + 1 : 0;
        seen_ += quickly ? 1 : -1;
    }
    // True: a burst has begun, and the progress thread has to be told, as it sleeps for longer. That costs a switch: where bells are held
    // back (ShmTransport::hold_bells) the first operations wake nobody in any case, and it pays later.
    bool leave(Time now, bool bells_are_held) {
        passed_at_.store(now, std::memory_order_relaxed);
        if (on_ || quick_ < (bells_are_held ? kMany : kQuick)) return false;
        on_ = true;
        seen_ = 0;
        apart_ = kLook;
        due_ = now + apart_;
        return true;
    }
    // By the progress thread, at any time: whether it goes on. Decided when a look is due.
    bool look(Time now) {
        if (on_ && now >= due_) {
            on_ = std::exchange(seen_, 0) > 0;
            apart_ = std::min(2 * apart_, kLongLook);
            due_ = now + apart_;
            if (!on_) quick_ = 0;
        }
        if (!on_) served_since_ = 0;
        return on_;
    }
    Time due() const { return due_; }
    // By the progress thread, which need not hold the lock for it: when it is to ask again, if a thread is in an operation, or has been just now, and
    // looks; else 0. That is after as long as it has been so: each time it takes the processor from who computes or copies for 20 us. (Who waits for
    // longer ends a burst; whoever has just left may not come back.)
    Time served_until(Time now) {
        const auto at = passed_at_.load(std::memory_order_relaxed);
        const bool inside = at < 0, served = inside ? now + at < kLongest : now - at < kQuickly;
        if (!served) return served_since_ = 0;
        if (served_since_ == 0) served_since_ = now;
        return now + std::clamp(now - served_since_, kLook, inside ? kLongest : kLongLook);
    }

private:
    static constexpr Time kQuickly = 200'000;  // from one operation to the next
    static constexpr int kQuick = 8, kMany = 32;
    // What comes when nobody looks any more lies there so long at most; and in a burst that has lasted four times as long. A look costs both threads a
    // switch.
    static constexpr Time kLook = 500'000, kLongLook = 2'000'000;
    static constexpr Time kLongest = 8'000'000;  // and where a thread was inside when it was asked

    bool on_ = false;
    int quick_ = 0;  // operations in a row that were begun soon after the one before
    std::atomic<Time> passed_at_{0};  // the last one left, or, negative, began to wait
    Time served_since_ = 0;  // the progress thread's: whenever it has asked since; 0: not so
    Time due_ = 0, apart_ = kLook;
    int seen_ = 0;  // so many more such ones than others, since the last look
};

}  // namespace ftcomm
