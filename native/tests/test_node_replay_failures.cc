// The policy replay: members that leave, are voted out, come back, wait; operations that were given up or done again.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

// Between hosts a message that a leaver has sent is gone with it: nobody leaves before all are back, and at their end.
FT_TEST(replay_leaves_together) {
    Rig rig(2, Rig::replaying(false));
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    std::int64_t out = 5, in = 0;
    rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
    rig.settle();
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Agent);
    rig.settle();
    const auto leave = rig.node(0).leave(rig.now());
    rig.advance(5 * Rig::kHeartbeat);
    rig.settle();
    EXPECT(!leave->done);
    rig.restart(1);
    rig.settle();
    rig.join_comm(1, {0, 1}, Rig::kComm, Policy::Replay);
    in = 0;
    const auto got = rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
    rig.settle();
    EXPECT(got->done && in == 5);
    EXPECT(!leave->done);
    const auto last = rig.node(1).leave(rig.now());
    rig.settle();
    EXPECT(leave->done && leave->status.ok());
    EXPECT(last->done && last->status.ok());
}

// Voted out while it waits for the others' end, it has not left: its replacement goes on in its place.
FT_TEST(replay_that_is_voted_out_while_it_leaves_is_told) {
    Rig rig(2, Rig::replaying(false));
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    const auto leave = rig.node(1).leave(rig.now());
    rig.settle();
    rig.evidence(0, 1, Evidence::Agent);
    rig.settle();
    REQUIRE(leave->done);
    EXPECT_EQ(leave->status.code, Code::StaleEpoch);
}

// Voted out as silent when it has all answers, but has not read them: it leaves before it hears of it, and nobody comes in its place.
FT_TEST(replay_goodbye_of_one_that_is_out_ends_the_wait_for_it) {
    Rig rig(2, Rig::replaying(false));
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    rig.hold(0, 1);
    const auto stays = rig.node(0).leave(rig.now()), stopped = rig.node(1).leave(rig.now());
    rig.settle();
    rig.evidence(0, 1, Evidence::Agent);
    rig.settle();
    EXPECT(!stays->done && !stopped->done);
    rig.hold(0, 1, false);
    rig.settle();
    REQUIRE(stopped->done && stays->done);
    EXPECT(stopped->status.ok() && stays->status.ok());
}

// A rank that hears of two admissions at once, one of them not its communicator's, counts attempts as those who saw one after the other.
FT_TEST(replay_attempts_do_not_depend_on_which_admissions_were_seen) {
    Rig rig(3, Rig::replaying());
    const std::vector<int> two = {0, 1};
    rig.comm(two, Rig::kComm, Policy::Replay);
    rig.kill(1);
    rig.kill(2);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.evidence(0, 2, Evidence::Pidfd);
    rig.settle();
    rig.hold(0, 1);
    rig.restart(1);
    rig.settle();
    rig.restart(2);
    rig.settle();
    rig.advance(2 * Rig::kHeartbeat);  // it looks for itself
    rig.settle();
    EXPECT_EQ(rig.node(1).alive_slots().text(), "{0,1,2}");
    rig.hold(0, 1, false);
    rig.join_comm(1, two, Rig::kComm, Policy::Replay);
    std::int64_t a = 1, b = 2;
    const auto first = rig.sum(0, a), second = rig.sum(1, b);
    rig.settle();
    EXPECT(first->done && second->done && a == 3 && b == 3);
}

// A rank that loses a race for the cell hears there of a newcomer whose join request is still on its way: it talks to it once there is a link.
FT_TEST(replay_newcomer_is_met_in_the_cell_before_it_is_heard) {
    Rig rig(4, Rig::replaying());
    const std::vector<int> all = {0, 1, 2, 3};
    rig.comm(all, Rig::kComm, Policy::Replay);
    const auto reborn = [&](int s) {
        rig.restart(s);
        rig.settle();
        rig.join_comm(s, all, Rig::kComm, Policy::Replay);
    };
    rig.kill(3);
    for (int s : {0, 1, 2}) rig.evidence(s, 3, Evidence::Pidfd);
    rig.settle();
    for (int s : {0, 2, 3}) rig.hold(s, 1);
    reborn(3);
    rig.kill(2);
    rig.evidence(1, 2, Evidence::Pidfd);
    rig.settle();
    EXPECT(rig.traced(1, "view.conflict"));
    for (int s : {0, 2, 3}) rig.hold(s, 1, false);
    rig.settle();
    reborn(2);
    rig.settle();
    std::int64_t in[4][4] = {}, out[4][4] = {};
    std::vector<RequestPtr> posted;
    for (int s : all) {
        OpDesc d;
        d.kind = OpKind::AllToAll;
        d.dtype = DType::Int64;
        d.count = 1;
        for (int to : all) out[s][to] = 10 * s + to;
        d.send = out[s];
        d.recv = in[s];
        posted.push_back(rig.node(s).collective(rig.now(), Rig::kComm, d));
    }
    rig.settle();
    for (int s : all) {
        REQUIRE(posted[static_cast<std::size_t>(s)]->done && posted[static_cast<std::size_t>(s)]->status.ok());
        for (int from : all) EXPECT_EQ(in[s][from], 10 * from + s);
    }
}

// A timeout of 10 heartbeats; rank 2 dies 8 after rank 0 began to wait for it.
struct WaitsForADeath {
    Rig rig;
    std::int64_t before[3] = {1, 2, 4}, mine[3] = {10, 20, 40}, note = 5, heard = 0;
    RequestPtr sum, message;

    static Rig::Setup setup() {
        auto s = Rig::replaying();
        s.timeout = 10 * Rig::kHeartbeat;
        return s;
    }
    void wait(int heartbeats) {
        for (int i = 0; i < heartbeats; ++i) {
            rig.advance(Rig::kHeartbeat);
            rig.settle();
        }
    }
    RequestPtr again() { return rig.node(2).send(rig.now(), Rig::kComm, &note, sizeof note, 0, 3); }
    WaitsForADeath() : rig(3, setup()) {
        rig.comm(kThree, Rig::kComm, Policy::Replay);
        for (int s : kThree) rig.sum(s, before[s]);
        for (int i = 0; i < 4; ++i) again();
        rig.settle();
        sum = rig.sum(0, mine[0]);
        rig.sum(1, mine[1]);
        message = rig.node(1).recv(rig.now(), Rig::kComm, &heard, sizeof heard, 2, 9);
        wait(8);
        rig.kill(2);
        rig.evidence(0, 2, Evidence::Pidfd);
        rig.settle();
    }
    void reborn(int after) {
        wait(after);
        rig.restart(2);
        rig.settle();
        rig.join_comm(2, kThree, Rig::kComm, Policy::Replay);
        std::int64_t first = 4;
        EXPECT(rig.sum(2, first)->done);
        rig.settle();
    }
};

// The timer starts anew with the death, with the return, and with each sign of progress; what was wished for meanwhile is void.
FT_TEST(replay_time_of_a_recovery_is_not_counted) {
    WaitsForADeath w;
    w.reborn(7);
    for (int i = 0; i < 4; ++i) {
        w.wait(7);
        EXPECT(w.again()->done);
    }
    w.wait(7);
    w.rig.sum(2, w.mine[2]);
    w.rig.settle();
    REQUIRE(w.sum->done);
    EXPECT(w.sum->status.ok() && w.mine[0] == 70);
    EXPECT(!w.message->done);
}

FT_TEST(replay_that_stops_in_a_recovery_is_a_timeout) {
    WaitsForADeath w;
    w.reborn(1);
    w.wait(12);
    REQUIRE(w.sum->done && w.message->done);
    EXPECT_EQ(w.sum->status.code, Code::Timeout);
    EXPECT_EQ(w.message->status.code, Code::Timeout);
}

namespace {
RequestPtr swap(Rig& rig, int slot, std::int64_t (&out)[3], std::int64_t (&in)[3]) {
    OpDesc d;
    d.kind = OpKind::AllToAll;
    d.dtype = DType::Int64;
    d.count = 1;
    d.send = out;
    d.recv = in;
    return rig.node(slot).collective(rig.now(), Rig::kComm, d);
}
}  // namespace

// Rank 0 had logged its result and waited in the fence when all gave the operation up. Its replacement, which leads, sees the same.
FT_TEST(replay_failure_stays_one_whatever_the_log_has) {
    for (bool everybody : {false, true}) {
        auto setup = Rig::replaying();
        setup.timeout = 10 * Rig::kHeartbeat;
        Rig rig(3, setup);
        rig.comm(kThree, Rig::kComm, Policy::Replay);
        std::int64_t out[3][3] = {}, in[3][3] = {}, x[3] = {1, 2, 4};
        rig.hold(1, 2);
        std::vector<RequestPtr> first;
        for (int s : kThree) first.push_back(swap(rig, s, out[s], in[s]));
        for (int i = 0; i < 12; ++i) {
            rig.settle();
            rig.advance(Rig::kHeartbeat);
        }
        rig.hold(1, 2, false);
        rig.settle();
        for (const auto& r : first) EXPECT(r->done && r->status.code == Code::Timeout);
        EXPECT_EQ(rig.log(0).streams[(LogKey{Rig::kComm, 0, kResults})].size(), 1u);
        const auto message = first[0]->status.message;
        RequestPtr second[3];
        for (int s : {1, 2}) second[s] = rig.sum(s, x[s]);
        rig.settle();
        for (int s : everybody ? std::vector<int>{1, 0} : std::vector<int>{0}) {
            rig.replace(s, 2, kThree);
            rig.settle();
        }
        const auto again = swap(rig, 0, out[0], in[0]);
        rig.settle();
        REQUIRE(again->done);
        EXPECT_EQ(again->status.code, Code::Timeout);
        EXPECT_EQ(again->status.message, message);
        second[0] = rig.sum(0, x[0]);
        if (everybody) {
            EXPECT_EQ(swap(rig, 1, out[1], in[1])->status.code, Code::Timeout);
            second[1] = rig.sum(1, x[1]);
        }
        rig.settle();
        for (const auto& r : second) {
            REQUIRE(r->done);
            EXPECT_EQ(r->status.code, Code::Revoked);
        }
    }
}

// Rank 1 had returned from the sum and died; nobody else has it, and its replacement does not come so far. They get it from the log.
FT_TEST(replay_what_may_have_been_returned_is_not_given_up) {
    auto setup = Rig::replaying();
    setup.timeout = 10 * Rig::kHeartbeat;
    Rig rig(3, setup);
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t x[3] = {1, 2, 4};
    for (int to : {0, 2}) rig.hold(1, to);
    std::vector<RequestPtr> sums;
    for (int s : kThree) sums.push_back(rig.sum(s, x[s]));
    rig.settle();
    REQUIRE(sums[1]->done && !sums[0]->done && !sums[2]->done);
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.settle();
    for (int to : {0, 2}) rig.hold(1, to, false);
    rig.restart(1);
    rig.settle();
    rig.join_comm(1, kThree, Rig::kComm, Policy::Replay);
    for (int i = 0; i < 12; ++i) {
        rig.settle();
        rig.advance(Rig::kHeartbeat);
    }
    rig.settle();
    std::int64_t again = 2;
    sums[1] = rig.sum(1, again);
    rig.settle();
    for (const auto& r : sums) EXPECT(r->done && r->status.ok());
    EXPECT(x[0] == 7 && again == 7 && x[2] == 7);
}

// Rank 1 had come through the fence; rank 0 and the replacement do the operation again when it is given up. Both have it in their logs.
FT_TEST(replay_what_is_done_again_and_complete_is_taken_from_the_log) {
    auto setup = Rig::replaying();
    setup.timeout = 10 * Rig::kHeartbeat;
    Rig rig(2, setup);
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    std::int64_t x[2] = {1, 2};
    const auto post = [&](int slot) {
        OpDesc d;
        d.kind = OpKind::AllReduce;
        d.dtype = DType::Int64;
        d.op = ReduceOp::Sum;
        d.algorithm = Algorithm::Ring;
        d.count = 1;
        d.recv = &x[slot];
        return rig.node(slot).collective(rig.now(), Rig::kComm, d);
    };
    auto first = post(0), second = post(1);
    while (!second->done && (rig.deliver(0, 1) || rig.deliver(1, 0))) {}
    REQUIRE(second->done && !first->done);
    rig.hold(1, 0);
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.settle();
    rig.hold(1, 0, false);
    rig.restart(1);
    rig.settle();
    rig.join_comm(1, {0, 1}, Rig::kComm, Policy::Replay);
    rig.settle();
    rig.hold(0, 1);
    rig.hold(1, 0);
    x[1] = 2;
    second = post(1);
    rig.advance(12 * Rig::kHeartbeat);
    EXPECT(!first->done && !second->done);
    rig.hold(0, 1, false);
    rig.hold(1, 0, false);
    rig.settle();
    REQUIRE(first->done && second->done);
    EXPECT(first->status.ok() && second->status.ok() && x[0] == 3 && x[1] == 3);
}

}  // namespace ftcomm::unit
