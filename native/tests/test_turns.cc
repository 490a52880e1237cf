#include "runtime/turns.h"

#include "tests/unit.h"

namespace ftcomm {

namespace {

constexpr Time kMicro = 1'000, kMilli = 1'000'000;

// A wait in which the processor is handed on once, for so long.
void wait(Turns& turns, Time& now, Time turn) {
    turns.begin_wait(now);
    turns.took(now, now + turn);
    now += turn;
    turns.end_wait();
}

}  // namespace

FT_TEST(two_long_turns_say_that_somebody_computes) {
    Turns turns;
    Time now = kMilli;
    wait(turns, now, 3 * kMilli);
    EXPECT(!turns.are_long(now));
    for (int i = 0; i < 100; ++i) wait(turns, now, 5 * kMicro);  // forgotten
    wait(turns, now, 3 * kMilli);
    EXPECT(!turns.are_long(now));
    wait(turns, now, 3 * kMilli);
    EXPECT(turns.are_long(now) && turns.are_long(now + 99 * kMilli) && !turns.are_long(now + 100 * kMilli));
    now += 100 * kMilli;
    wait(turns, now, 3 * kMilli);
    EXPECT(turns.are_long(now));
}

FT_TEST(waits_without_handing_on_make_up_for_nothing) {
    Turns turns;
    Time now = kMilli;
    wait(turns, now, 3 * kMilli);
    for (int i = 0; i < 100; ++i) {
        turns.begin_wait(now);
        turns.end_wait();
    }
    wait(turns, now, 3 * kMilli);
    EXPECT(turns.are_long(now));
}

FT_TEST(processor_that_nobody_takes_is_not_handed_on_for_long) {
    Turns turns;
    Time now = kMilli;
    const auto times = [&] {
        turns.begin_wait(now);
        int n = 0;
        for (; turns.took(now, now + kMicro / 2); now += kMicro / 2) ++n;
        turns.end_wait();
        return n;
    };
    EXPECT_EQ(times(), 1000);
    turns.slept(now, now + 150 * kMicro);
    EXPECT_EQ(times(), 1000);
    turns.slept(now, now + 149 * kMicro);  // as if it had been waited for
    EXPECT_EQ(times(), 400);
    now += 90 * kMilli;
    turns.slept(now, now + 149 * kMicro);
    EXPECT_EQ(times(), 400);
    now += 10 * kMilli;  // tried again
    EXPECT_EQ(times(), 1000);
    turns.begin_wait(now);
    for (int i = 0; i < 1000; ++i, now += 5 * kMicro) EXPECT(turns.took(now, now + 5 * kMicro));
}

}  // namespace ftcomm
