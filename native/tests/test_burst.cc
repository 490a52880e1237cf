#include "runtime/burst.h"

#include <vector>

#include "tests/unit.h"

namespace ftcomm {

namespace {

constexpr Time kMicro = 1'000, kMilli = 1'000'000;

// One operation of 5 us after a pause; true if a burst begins with its end.
bool operation(Burst& burst, Time& now, Time pause, bool bells_are_held = false) {
    burst.enter(now += pause);
    return burst.leave(now += 5 * kMicro, bells_are_held);
}

// Begins one; how many operations that took, of those that followed a short pause.
int begin(Burst& burst, Time& now, bool bells_are_held = false) {
    for (int i = 1; i <= 100; ++i)
        if (operation(burst, now, 20 * kMicro, bells_are_held)) return i;
    return 0;
}

}  // namespace

FT_TEST(a_burst_is_operations_that_follow_each_other_at_once) {
    Burst burst;
    Time now = 10 * kMilli;
    for (int i = 0; i < 100; ++i) EXPECT(!operation(burst, now, 300 * kMicro));
    EXPECT(!burst.on());
    EXPECT_EQ(begin(burst, now), 8);
    EXPECT(burst.on());
    EXPECT_EQ(begin(burst, now), 0);  // it is said once
}

FT_TEST(where_the_first_operations_wake_nobody_a_burst_begins_later) {
    Burst burst;
    Time now = 10 * kMilli;
    EXPECT_EQ(begin(burst, now, true), 33);  // the first one came after a pause
    EXPECT(burst.on());
}

FT_TEST(a_pause_begins_the_count_again) {
    Burst burst;
    Time now = 10 * kMilli;
    for (int i = 0; i < 20; ++i) {
        for (int k = 0; k < 7; ++k) EXPECT(!operation(burst, now, 20 * kMicro));
        EXPECT(!operation(burst, now, 1 * kMilli));
    }
}

FT_TEST(a_burst_goes_on_while_each_look_finds_another_operation) {
    Burst burst;
    Time now = 10 * kMilli;
    REQUIRE(begin(burst, now) > 0);
    for (int i = 0; i < 10; ++i) {
        const auto due = burst.due();
        EXPECT(due > now && due <= now + 2 * kMilli + 25 * kMicro);
        while (now + 25 * kMicro < due) {
            operation(burst, now, 20 * kMicro);
            EXPECT(burst.look(now));  // not due: asked for another reason
        }
        EXPECT(burst.look(due));
    }
    // What came before the last look does not count for the next.
    now = burst.due();
    EXPECT(!burst.look(now));
    EXPECT(!burst.on());
    EXPECT_EQ(begin(burst, now), 9);  // the first one after a pause
}

FT_TEST(looks_are_further_apart_when_a_burst_lasts_and_close_again_in_the_next) {
    Burst burst;
    Time now = 10 * kMilli;
    for (int round = 0; round < 2; ++round) {
        REQUIRE(begin(burst, now) > 0);
        std::vector<Time> apart;
        for (auto before = now; apart.size() < 5; before = now) {
            while (now < burst.due()) operation(burst, now, 20 * kMicro);
            apart.push_back((now - before) / (100 * kMicro));
            REQUIRE(burst.look(now));
        }
        EXPECT((apart == std::vector<Time>{5, 10, 20, 20, 20}));
        EXPECT(!burst.look(now = burst.due()));
    }
}

FT_TEST(operations_with_pauses_end_a_burst) {  // others' operations need the progress thread in the pauses
    Burst burst;
    Time now = 10 * kMilli;
    REQUIRE(begin(burst, now) > 0);
    for (int i = 0; i < 4; ++i) {
        operation(burst, now, 300 * kMicro);
        burst.look(now);
    }
    EXPECT(!burst.on());
}

FT_TEST(one_pause_does_not_end_a_burst) {
    Burst burst;
    Time now = 10 * kMilli;
    REQUIRE(begin(burst, now) > 0);
    for (int i = 0; i < 4; ++i) {
        while (now < burst.due()) {
            for (int k = 0; k < 2; ++k) operation(burst, now, 20 * kMicro);
            operation(burst, now, 300 * kMicro);
        }
        EXPECT(burst.look(now));
    }
    while (now < burst.due()) {  // but every other operation after a pause does
        operation(burst, now, 20 * kMicro);
        operation(burst, now, 300 * kMicro);
    }
    EXPECT(!burst.look(now));
}

FT_TEST(a_thread_that_waits_for_long_ends_a_burst) {
    Burst burst;
    Time now = 10 * kMilli;
    REQUIRE(begin(burst, now) > 0);
    burst.enter(now += 20 * kMicro);
    EXPECT(burst.look(now = burst.due()));
    EXPECT(!burst.look(now = burst.due()));
    EXPECT(!burst.leave(now + kMilli, false));
    EXPECT(!burst.on());
}

FT_TEST(who_is_in_an_operation_or_was_just_now_looks_for_the_progress_thread) {
    Burst burst;
    Time now = 10 * kMilli;
    const auto is_served = [&](Time at) { return burst.served_until(at) != 0; };
    EXPECT(!is_served(now));
    burst.enter(now);
    EXPECT(is_served(now) && is_served(now + 7 * kMilli) && !is_served(now + 8 * kMilli));
    burst.leave(now += 5 * kMicro, false);
    EXPECT(is_served(now) && is_served(now + 199 * kMicro) && !is_served(now + 200 * kMicro));
}

FT_TEST(what_comes_lies_there_no_longer_than_others_have_looked) {
    for (const bool inside : {true, false}) {
        Burst burst;
        const Time since = 10 * kMilli;
        Time lies = 0;
        for (Time now = since; now < since + 100 * kMilli; now += lies) {
            burst.enter(now);
            if (!inside) burst.leave(now, false);
            lies = burst.served_until(now) - now;
            EXPECT(lies >= 500 * kMicro && lies <= (inside ? 8 : 2) * kMilli && (lies <= now - since || lies == 500 * kMicro));
        }
        EXPECT_EQ(lies, (inside ? 8 : 2) * kMilli);
        EXPECT_EQ(burst.served_until(since + 200 * kMilli), Time{0});  // and from the start
        burst.enter(since + 201 * kMilli);
        EXPECT_EQ(burst.served_until(since + 201 * kMilli), since + 201 * kMilli + 500 * kMicro);
    }
}

}  // namespace ftcomm
