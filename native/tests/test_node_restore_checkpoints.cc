// A replacement without its predecessor's log goes on from a checkpoint; and what comes between checkpoints and only it was told.
#include "tests/restore_rig.h"

namespace ftcomm::unit {

namespace {

// A prologue, three checkpoints with messages between them, and more behind.
struct WithCheckpoints : Apart {
    explicit WithCheckpoints(int any_before = -1, bool any_after = false) {
        sums(2);
        exchange(100);
        all_mark("", false);
        for (int c = 0; c < 3; ++c) {
            if (c == any_before) answer();
            exchange(10 * c);
            sums(c);
            all_mark("c" + std::to_string(c), true);
        }
        exchange(50);
        if (any_after) answer();
        sums(5);
    }
    void answer() {
        send(0, 1, 77, 9);
        EXPECT_EQ(received(1, -1, 9), 77);
    }
    void exchange(std::int64_t value) {
        send(0, 1, value);
        EXPECT_EQ(received(1, 0), value);
        send(1, 2, value + 1);
        EXPECT_EQ(received(2, 1), value + 1);
    }
    void prologue_again() {
        std::int64_t value = 2;
        const auto sum = rig.sum(1, value);
        rig.settle();
        EXPECT(sum->done && value == 6);
        EXPECT_EQ(received(1, 0), 100);
        EXPECT(send(1, 2, 101)->status.ok());
    }
    void end_again() {
        EXPECT_EQ(received(1, 0), 50);
        EXPECT(send(1, 2, 51)->status.ok());
        std::int64_t value = 5;
        const auto sum = rig.sum(1, value);
        rig.settle();
        EXPECT(sum->done && value == 15);
        exchange(60);
        sums(9);
        all_mark("live", true);
    }
};

}  // namespace

FT_TEST(restore_goes_on_from_the_newest_checkpoint) {
    for (bool twice : {false, true}) {
        WithCheckpoints a(1);  // what was received from ANY lies before a checkpoint
        auto ready = a.lost(1);
        REQUIRE(ready->done && ready->status.ok());
        const std::vector<std::string> tags = {"c2", "c1"};
        EXPECT(a.rig.node(1).comm_checkpoints(Rig::kComm) == tags);
        if (twice) {
            a.kill(1);
            ready = a.restart(1);
            a.rig.settle();
            REQUIRE(ready->done && ready->status.ok());
        }
        a.prologue_again();
        const auto resumed = a.rig.mark(1, "c2", false);
        a.rig.settle();
        REQUIRE(resumed->done && resumed->status.ok());
        a.end_again();
    }
}

// The newest may turn out to be damaged: the one before it is there as well (L4).
FT_TEST(restore_goes_on_from_the_checkpoint_before) {
    WithCheckpoints a;
    const auto ready = a.lost(1);
    REQUIRE(ready->done && ready->status.ok());
    a.prologue_again();
    const auto resumed = a.rig.mark(1, "c1", false);
    a.rig.settle();
    REQUIRE(resumed->done && resumed->status.ok());
    EXPECT_EQ(a.received(1, 0), 20);
    EXPECT(a.send(1, 2, 21)->status.ok());
    std::int64_t value = 2;
    a.rig.sum(1, value);
    const auto committed = a.rig.mark(1, "c2", true);
    a.rig.settle();
    EXPECT(committed->done && committed->status.ok() && value == 6);
    a.end_again();
}

FT_TEST(restore_refuses_answers_behind_the_newest_checkpoint) {
    WithCheckpoints a(-1, true);
    EXPECT(has(a.refused(a.lost(1)), "since the last checkpoint that all ranks have"));
}

// Who heard of an answer has it on record; and who was given one tells those who come later.
FT_TEST(restore_word_of_an_answer_outlives_who_heard_it) {
    for (bool told_again : {false, true}) {
        WithCheckpoints a(-1, true);
        if (!told_again) a.kill(1);
        for (int s : {0, 2}) {
            a.kill(s);
            if (told_again) a.rig.log(s).streams.erase({Rig::kComm, s, kHeard, 1});
            a.restart(s);
            a.rig.settle();
        }
        if (told_again) a.kill(1);
        a.rig.lose_log(1);
        EXPECT(has(a.refused(a.restart(1)), "since the last checkpoint that all ranks have"));
    }
}

FT_TEST(restore_refuses_messages_to_itself_from_before_the_resume_point) {
    Apart a;
    a.send(1, 1, 4);
    EXPECT_EQ(a.received(1, 1), 4);
    a.all_mark("", false);
    a.all_mark("c", true);
    EXPECT(has(a.refused(a.lost(1)), "to itself"));
}

FT_TEST(restore_repeats_messages_to_itself) {
    Apart a;
    a.all_mark("", false);
    a.send(1, 1, 3);
    EXPECT_EQ(a.received(1, 1), 3);
    a.all_mark("c", true);
    a.send(1, 1, 4);
    EXPECT_EQ(a.received(1, 1), 4);
    const auto ready = a.lost(1);
    REQUIRE(ready->done && ready->status.ok());
    const auto resumed = a.rig.mark(1, "c", false);
    a.rig.settle();
    REQUIRE(resumed->done && resumed->status.ok());
    EXPECT(a.send(1, 1, 4)->status.ok());
    EXPECT_EQ(a.received(1, 1), 4);
    a.all_mark("d", true);
}

}  // namespace ftcomm::unit
