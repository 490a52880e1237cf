// The policy replay, and a death that nobody replaces: whoever waits for it ends like one that has died.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

Rig::Setup patient() {
    auto setup = Rig::replaying();
    setup.timeout = 4 * Rig::kHeartbeat;
    return setup;
}

// Ranks 0 and 1 are in an operation, rank 2 is dead.
struct Bereaved {
    Rig rig{3, patient()};
    std::int64_t a[3] = {1, 2, 4}, next = 0;
    RequestPtr sums[2];
    Bereaved() {
        rig.comm(kThree, Rig::kComm, Policy::Replay);
        for (int s : {0, 1}) sums[s] = rig.sum(s, a[s]);
        rig.settle();
        rig.kill(2);
        rig.evidence(0, 2, Evidence::Pidfd);
        rig.settle();
    }
    void nobody_goes_on() {
        rig.settle();
        for (int s : {0, 1}) {
            REQUIRE(sums[s]->done);
            EXPECT_EQ(sums[s]->status.code, Code::PeerFailure);
            EXPECT(sums[s]->status.ranks == std::vector<int>{2});
            EXPECT(sums[s]->status.message.find("no replacement came within the timeout") != std::string::npos);
            const auto another = rig.sum(s, next);
            EXPECT(another->done && another->status.code == Code::PeerFailure);
        }
    }
};

}  // namespace

FT_TEST(unreplaced_death_ends_what_waits) {
    Bereaved b;
    b.rig.advance(2 * Rig::kHeartbeat);
    EXPECT(!b.sums[0]->done && !b.sums[1]->done);
    b.rig.advance(3 * Rig::kHeartbeat);
    b.nobody_goes_on();
}

FT_TEST(unreplaced_death_is_waited_for_anew_when_somebody_comes) {
    Bereaved b;
    b.rig.advance(3 * Rig::kHeartbeat);
    b.rig.restart(2);
    b.rig.settle();
    b.rig.advance(3 * Rig::kHeartbeat);  // it prepares
    EXPECT(!b.sums[0]->done && !b.sums[1]->done);
    b.rig.kill(2);
    b.rig.evidence(0, 2, Evidence::Pidfd);
    b.rig.settle();
    b.rig.advance(3 * Rig::kHeartbeat);
    EXPECT(!b.sums[0]->done && !b.sums[1]->done);
    b.rig.advance(2 * Rig::kHeartbeat);
    b.nobody_goes_on();
}

// An operation may be given less time than a process takes to start.
FT_TEST(unreplaced_death_is_waited_for_longer_than_an_operation) {
    Rig rig(3, patient());
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t mine = 1;
    OpDesc d;
    d.kind = OpKind::AllReduce;
    d.dtype = DType::Int64;
    d.count = 1;
    d.send = d.recv = &mine;
    d.timeout = Rig::kHeartbeat;
    const auto sum = rig.node(0).collective(rig.now(), Rig::kComm, d);
    rig.settle();
    rig.kill(2);
    rig.evidence(0, 2, Evidence::Pidfd);
    rig.settle();
    rig.advance(3 * Rig::kHeartbeat);
    EXPECT(!sum->done);
    rig.advance(2 * Rig::kHeartbeat);
    rig.settle();
    EXPECT(sum->done && sum->status.code == Code::PeerFailure);
}

// Else all of a large job would give up one after another, and each of them wait for the one before it.
FT_TEST(unreplaced_death_is_not_waited_for_anew_when_another_one_dies) {
    Bereaved b;
    b.rig.advance(3 * Rig::kHeartbeat);
    b.rig.kill(1);
    b.rig.evidence(0, 1, Evidence::Pidfd);
    b.rig.settle();
    EXPECT(!b.sums[0]->done);
    b.rig.advance(2 * Rig::kHeartbeat);
    b.rig.settle();
    REQUIRE(b.sums[0]->done);
    EXPECT(b.sums[0]->status.ranks == (std::vector<int>{1, 2}));
}

// Ctrl-C, while nothing can be decided.
FT_TEST(unreplaced_death_and_an_interrupt) {
    Bereaved b;
    b.rig.node(0).fail_request(b.rig.now(), b.sums[0], Code::Interrupted);
    b.rig.settle();
    REQUIRE(b.sums[0]->done);
    EXPECT_EQ(b.sums[0]->status.code, Code::Interrupted);
    EXPECT(!b.sums[1]->done);
    const auto another = b.rig.sum(0, b.next);
    EXPECT(another->done && another->status.code == Code::Interrupted);
    // With a cancelled one it waits: its end is decided when the dead one is back.
    b.rig.node(1).fail_request(b.rig.now(), b.sums[1], Code::Cancelled);
    b.rig.settle();
    EXPECT(!b.sums[1]->done);
}

// Its process goes on living, in a debugger perhaps. The others wait for its replacement, not for its votes.
FT_TEST(unreplaced_death_and_one_that_has_given_up_and_lives) {
    Bereaved b;
    b.rig.node(0).fail_request(b.rig.now(), b.sums[0], Code::Interrupted);
    b.rig.settle();
    EXPECT(b.sums[0]->done && b.rig.removed(1, 0, Evidence::GaveUp));
    b.rig.restart(2);
    b.rig.settle();
    EXPECT_EQ(b.rig.node(1).alive_slots().text(), "{1,2}");
    b.rig.join_comm(2, kThree, Rig::kComm, Policy::Replay);
    const auto again = b.rig.sum(2, b.a[2]);
    b.rig.replace(0, 1, kThree);
    b.a[0] = 1;
    const auto last = b.rig.sum(0, b.a[0]);
    b.rig.settle();
    EXPECT(again->done && last->done && b.sums[1]->done && b.sums[1]->status.ok());
    for (auto x : b.a) EXPECT_EQ(x, 7);
}

// Both at once: who gives up finds that somebody has come.
FT_TEST(unreplaced_death_and_a_replacement_at_the_last_moment) {
    Bereaved b;
    b.rig.hold_cells(1);
    b.rig.hold(0, 1);
    b.rig.hold(2, 1);
    b.rig.node(1).fail_request(b.rig.now(), b.sums[1], Code::Interrupted);
    b.rig.restart(2);
    b.rig.settle();
    EXPECT(!b.sums[1]->done);
    EXPECT_EQ(b.rig.node(0).alive_slots().text(), "{0,1,2}");
    b.rig.hold_cells(1, false);
    b.rig.settle();
    for (int other : {0, 2}) b.rig.hold(other, 1, false);
    b.rig.settle();
    EXPECT_EQ(b.rig.node(0).alive_slots().text(), "{0,1,2}");
    b.rig.join_comm(2, kThree, Rig::kComm, Policy::Replay);
    const auto again = b.rig.sum(2, b.a[2]);
    b.rig.settle();
    REQUIRE(b.sums[0]->done && b.sums[1]->done && again->done);
    EXPECT_EQ(b.sums[0]->status.code, b.sums[1]->status.code);
    EXPECT_EQ(b.sums[0]->status.code, again->status.code);
}

}  // namespace ftcomm::unit
