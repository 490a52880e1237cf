// What comes of handing a processor on, for one of the ranks that share it.
//
// Mostly another rank takes it, and gives it back in microseconds. Where somebody computes there it comes back when that one's turn is over, in
// milliseconds, and who sleeps and is woken gets it at once. One long turn is none: it may have been the host's doing, or a tick's.
#pragma once

#include "communicator/request.h"

namespace ftcomm {

class Turns {
public:
    // Somebody computes there.
    bool are_long(Time now) const { return now < long_until_; }

    void begin_wait(Time now) {
        alone_since_ = now;
        handed_on_ = was_long_ = false;
    }
    // It was handed on at `before`, and is back. False: nobody has taken it for a while, so whoever is waited for is on another processor, or waits
    // for this one where it cannot be handed over (in another cgroup).
    bool took(Time before, Time now) {
        handed_on_ = true;
        if (now - before > kSwitch) alone_since_ = now;
        if (now - before > kLong) note_long(now);
        return now - alone_since_ <= (now < sooner_until_ ? kAloneThen : kAlone);
    }
    // It slept instead. If what it waited for came soon then, that may have been for want of this processor: the next waits are not so long.
    void slept(Time from, Time to) {
        if (to - from < kSoon && to >= sooner_until_) sooner_until_ = to + kCrowded;
    }
    void end_wait() {
        if (handed_on_ && !was_long_ && long_ > 0) --long_;
    }

private:
    static constexpr Time kSwitch = 1'000;  // ns; a switch to another process takes longer
    static constexpr Time kAlone = 500'000;  // a peer's read of 4 MiB
    static constexpr Time kAloneThen = 200'000, kSoon = 150'000;
    static constexpr Time kLong = 1'000'000;  // longer than a rank's turn in a collective; whoever only computes is given 3 ms
    static constexpr Time kCrowded = 100'000'000;
    static constexpr int kWeight = 8;  // waits with short turns that make up for one with a long one

    void note_long(Time now) {
        was_long_ = true;
        long_ += kWeight;
        if (long_ < 2 * kWeight) return;
        long_until_ = now + kCrowded;
        long_ = 2 * kWeight - 1;  // after that one more is enough
    }

    Time alone_since_ = 0, long_until_ = 0, sooner_until_ = 0;
    int long_ = 0;
    bool handed_on_ = false, was_long_ = false;  // in this wait
};

}  // namespace ftcomm
