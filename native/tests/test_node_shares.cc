// The policy replay: on one host each rank logs a share of a small all-reduce, which has no fence.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

// Ranks 1 and 2 have returned from a sum of 70 that rank 0 has not, which has therefore not logged its share; `dead` have died.
struct Unshared {
    Rig rig{3, {.replay = true}};
    std::int64_t a[3] = {1, 2, 4}, b[3] = {10, 20, 40};
    RequestPtr first;

    explicit Unshared(std::vector<int> dead) {
        rig.comm(kThree, Rig::kComm, Policy::Replay);
        for (int s : kThree) rig.sum(s, a[s]);
        rig.settle();
        rig.hold(1, 0);
        rig.hold(2, 0);
        first = rig.sum(0, b[0]);
        for (int s : {1, 2}) EXPECT(!first->done && rig.sum(s, b[s]) != nullptr);
        rig.settle();
        EXPECT(!first->done && b[1] == 70 && b[2] == 70);
        for (int s : dead) rig.kill(s);
        for (int s : dead) rig.evidence(0, s, Evidence::Pidfd);
        rig.settle();
        rig.hold(1, 0, false);
        rig.hold(2, 0, false);
        for (int s : dead) rig.restart(s);
        rig.settle();
        for (int s : dead) rig.join_comm(s, kThree, Rig::kComm, Policy::Replay);
        rig.settle();
    }
    // Does again what its predecessor did.
    void run_again(int slot) {
        std::int64_t one = 1 << slot;
        const auto old = rig.sum(slot, one);
        rig.settle();
        EXPECT(old->done && one == 7);
        b[slot] = 10 << slot;
        const auto again = rig.sum(slot, b[slot]);
        rig.settle();
        EXPECT(again->done == first->done);
    }
};

}  // namespace

// On one host each rank logs a share. Rank 2 lives, and hands it out.
FT_TEST(replay_hands_out_what_is_not_in_all_logs) {
    Unshared run({1});
    EXPECT(!run.first->done);  // it goes round by way of rank 1's replacement
    run.run_again(1);
    REQUIRE(run.first->done);
    EXPECT_EQ(run.b[0], 70);
    EXPECT_EQ(run.b[1], 70);
}

// Nobody has all of it any more, and nobody is past it: it is done again.
FT_TEST(replay_does_again_what_is_not_in_all_logs) {
    Unshared run({1, 2});
    run.run_again(2);
    EXPECT(!run.first->done);
    run.run_again(1);
    for (int s : kThree) EXPECT_EQ(run.b[s], 70);
    // What all have logged now is served to whoever comes.
    run.rig.replace(0, 1, kThree);
    run.rig.settle();
    for (std::int64_t expected : {7, 70}) {
        std::int64_t value = expected == 7 ? 1 : 10;
        const auto served = run.rig.sum(0, value);
        run.rig.settle();
        EXPECT(served->done && value == expected);
    }
}

// Rank 1's log has no room for its share. It says so before it has sent its input, with which the others could complete the operation: then
// whoever comes later would need that share.
FT_TEST(replay_full_log_is_known_before_others_can_return) {
    Rig rig(3, {.replay = true});
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t a[3] = {1, 2, 4}, b[3] = {10, 20, 40};
    for (int s : kThree) rig.sum(s, a[s]);
    rig.settle();
    rig.log(0).full_slot = 1;
    std::vector<RequestPtr> sums;
    for (int s : kThree) sums.push_back(rig.sum(s, b[s]));
    rig.settle();
    for (const auto& sum : sums) {
        REQUIRE(sum->done);
        EXPECT_EQ(sum->status.code, Code::LogFull);
    }
    rig.replace(2, 0, kThree);
    rig.settle();
    std::int64_t value = 4;
    const auto served = rig.sum(2, value);
    const auto failed = rig.sum(2, b[2]);
    rig.settle();
    REQUIRE(served->done && failed->done);
    EXPECT_EQ(value, 7);
    EXPECT_EQ(failed->status.code, Code::LogFull);
}

}  // namespace ftcomm::unit
