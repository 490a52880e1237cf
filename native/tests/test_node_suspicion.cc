// Silence and resets: who waits for whom before it proposes a removal (M11), and who is out does nothing any more.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {
constexpr Time kMs = 1'000'000;
}

// All of a cut-off rank's links are reset, but the first reset comes alone. It must not take itself for the larger side.
FT_TEST(resets_one_by_one_do_not_let_the_smaller_side_win) {
    Rig::Setup setup;
    setup.one_host = false;
    Rig rig(5, setup);
    rig.advance(Rig::kHeartbeat);
    rig.evidence(0, 1, Evidence::Reset);
    rig.evidence(1, 0, Evidence::Reset);
    rig.advance(50 * kMs, {0});
    rig.evidence(0, 1, Evidence::Reset);
    rig.evidence(1, 0, Evidence::Reset);
    rig.advance(100 * kMs, {0});
    EXPECT_EQ(rig.asked(0), 0u);  // four of five are out of its reach
    EXPECT_EQ(rig.asked(1), 1u);  // one of five
    rig.advance(150 * kMs, {0});
    EXPECT_EQ(rig.asked(0), 1u);  // nobody has done anything about it: its turn
}

// A rank that all the others miss goes as soon as they are known to be there: no tick is waited for.
FT_TEST(reset_of_one_rank_counts_when_it_is_refused_again) {
    Rig::Setup setup;
    setup.one_host = false;
    Rig rig(5, setup);
    rig.advance(Rig::kHeartbeat);
    rig.evidence(0, 1, Evidence::Reset);
    rig.jump(24 * kMs);
    for (int other : {2, 3, 4}) rig.node(0).on_heard(rig.now(), other, 0);
    EXPECT_EQ(rig.asked(0), 0u);  // once is not enough, however long ago
    rig.jump(1 * kMs);
    rig.evidence(0, 1, Evidence::Reset);
    EXPECT_EQ(rig.asked(0), 1u);
}

FT_TEST(reset_of_one_rank_waits_until_the_others_are_heard) {
    Rig::Setup setup;
    setup.one_host = false;
    Rig rig(5, setup);
    rig.advance(Rig::kHeartbeat);
    rig.evidence(0, 1, Evidence::Reset);
    rig.jump(25 * kMs);
    rig.evidence(0, 1, Evidence::Reset);
    for (int other : {2, 3}) rig.node(0).on_heard(rig.now(), other, 0);
    EXPECT_EQ(rig.asked(0), 0u);  // rank 4 may be out of its reach, too
    rig.node(0).on_heard(rig.now(), 4, 0);
    EXPECT_EQ(rig.asked(0), 1u);
}

FT_TEST(reset_of_a_link_that_heals_is_no_complaint) {
    Rig::Setup setup;
    setup.one_host = false;
    Rig rig(5, setup);
    rig.advance(Rig::kHeartbeat);
    rig.evidence(0, 1, Evidence::Reset);
    rig.advance(50 * kMs);
    rig.advance(500 * kMs);
    EXPECT_EQ(rig.asked(0), 0u);
}

// The leader's decision is recorded, but it is voted out before it hears of that.
FT_TEST(rank_that_is_out_acts_on_no_late_reply_of_the_cell) {
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    rig.hold_cells(0);
    rig.kill(3);
    rig.evidence(1, 3, Evidence::Pidfd);
    rig.settle();
    REQUIRE(rig.asked(0) == 1);  // the decision about the communicator
    rig.reach(0);
    rig.hold(0, 1);
    rig.hold(0, 2);
    rig.evidence(1, 0, Evidence::Agent);
    rig.settle();
    REQUIRE(rig.node(0).stale());
    const auto before = rig.in_flight(0, 1) + rig.in_flight(0, 2);
    rig.answer(0);
    EXPECT_EQ(rig.in_flight(0, 1) + rig.in_flight(0, 2), before);
    std::int64_t x = 1, y = 2;
    const auto a = rig.sum(1, x), b = rig.sum(2, y);
    rig.settle();
    EXPECT(a->done && a->status.ok() && x == 3);
    EXPECT(b->done && b->status.ok() && y == 3);
}

FT_TEST(large_send_that_nobody_receives_times_out) {
    Rig::Setup setup;
    setup.timeout = 3 * Rig::kHeartbeat;
    Rig rig(2, setup);
    rig.comm({0, 1});
    const Bytes data(1000);
    const auto send = rig.node(0).send(rig.now(), Rig::kComm, data.data(), data.size(), 1, 5);
    rig.settle();
    rig.advance(2 * Rig::kHeartbeat);
    EXPECT(!send->done);
    rig.advance(2 * Rig::kHeartbeat);
    REQUIRE(send->done);
    EXPECT_EQ(send->status.code, Code::Timeout);
    EXPECT(send->status.ranks == std::vector<int>({1}));
    Bytes into(1000);  // and what it had announced is not taken for a message
    const auto recv = rig.node(1).recv(rig.now(), Rig::kComm, into.data(), into.size(), 0, 5);
    rig.settle();
    EXPECT(!recv->done);
    rig.node(0).send(rig.now(), Rig::kComm, data.data(), 10, 1, 5);
    rig.settle();
    EXPECT(recv->done && recv->status.ok() && recv->bytes == 10);
}

}  // namespace ftcomm::unit
