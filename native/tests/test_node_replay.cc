// The policy replay: a process that died runs again from the top, and nobody can tell from the results.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

Rig::Setup replay(bool one_host = true) {
    Rig::Setup s;
    s.replay = true;
    s.one_host = one_host;
    return s;
}
const std::vector<int> kThree = {0, 1, 2};

}  // namespace

FT_TEST(replay_serves_what_is_complete_and_waits_for_the_rest) {
    Rig rig(3, replay());
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t a[3] = {1, 2, 4}, b[3] = {10, 20, 40};
    for (int s : kThree) rig.sum(s, a[s]);
    rig.settle();
    for (auto x : a) EXPECT_EQ(x, 7);
    const auto first = rig.sum(0, b[0]), second = rig.sum(1, b[1]);
    rig.settle();
    rig.kill(2);
    rig.evidence(0, 2, Evidence::Pidfd);
    rig.settle();
    EXPECT(!first->done && !second->done);
    rig.restart(2);
    rig.settle();
    EXPECT_EQ(rig.node(0).alive_slots().text(), "{0,1,2}");
    rig.join_comm(2, kThree, Rig::kComm, Policy::Replay);
    rig.settle();
    std::int64_t again = 4;
    const auto served = rig.sum(2, again);
    rig.settle();
    REQUIRE(served->done);
    EXPECT_EQ(again, 7);
    const auto third = rig.sum(2, b[2]);
    rig.settle();
    REQUIRE(first->done && second->done && third->done);
    for (auto x : b) EXPECT_EQ(x, 70);
}

FT_TEST(replay_message_is_delivered_once_whoever_dies) {
    for (bool one_host : {true, false}) {
        Rig rig(2, replay(one_host));
        rig.comm({0, 1}, Rig::kComm, Policy::Replay);
        std::int64_t out = 5, in = 0, in2 = 0;
        auto sent = rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
        EXPECT(sent->done && sent->status.ok());
        out = 6;
        rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
        auto got = rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
        rig.settle();
        EXPECT(got->done && in == 5);
        rig.kill(1);
        rig.evidence(0, 1, Evidence::Pidfd);
        rig.settle();
        rig.restart(1);
        rig.settle();
        rig.join_comm(1, {0, 1}, Rig::kComm, Policy::Replay);
        in = 0;
        got = rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
        auto got2 = rig.node(1).recv(rig.now(), Rig::kComm, &in2, sizeof in2, 0, 3);
        rig.settle();
        EXPECT(got->done && in == 5);
        EXPECT(got2->done && in2 == 6);
        rig.kill(0);  // now the sender: it sends the same again, then a third
        rig.evidence(1, 0, Evidence::Pidfd);
        rig.settle();
        rig.restart(0);
        rig.settle();
        rig.join_comm(0, {0, 1}, Rig::kComm, Policy::Replay);
        for (std::int64_t x : {5, 6, 7}) {
            sent = rig.node(0).send(rig.now(), Rig::kComm, &x, sizeof x, 1, 3);
            EXPECT(sent->done && sent->status.ok());
        }
        auto got3 = rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
        rig.settle();
        EXPECT(got3->done && in == 7);
    }
}

// What is in the log before its frame comes belongs to the receive that waits, not to the one that looks there first.
FT_TEST(replay_receives_of_one_source_and_tag_keep_their_order) {
    Rig rig(2, replay());
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    std::int64_t in[3] = {}, other = 0;
    const auto receive = [&](std::int64_t* to, std::int64_t tag) {
        return rig.node(1).recv(rig.now(), Rig::kComm, to, sizeof *to, 0, tag);
    };
    const auto first = receive(&in[0], 3);
    std::int64_t out = 5;
    rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    const auto of_other = receive(&other, 4);
    const auto second = receive(&in[1], 3);
    EXPECT(first->done && in[0] == 5);
    for (std::int64_t x : {6, 7}) rig.node(0).send(rig.now(), Rig::kComm, &x, sizeof x, 1, 3);
    const auto third = receive(&in[2], 3);
    rig.settle();
    REQUIRE(second->done && third->done);
    EXPECT(in[1] == 6 && in[2] == 7);
    EXPECT(!of_other->done);
}

FT_TEST(replay_that_sends_something_else_is_told) {
    Rig rig(2, replay());
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    std::int64_t out = 5;
    rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    rig.kill(0);
    rig.evidence(1, 0, Evidence::Pidfd);
    rig.settle();
    rig.restart(0);
    rig.settle();
    rig.join_comm(0, {0, 1}, Rig::kComm, Policy::Replay);
    out = 6;
    const auto sent = rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    EXPECT(sent->done);
    EXPECT_EQ(sent->status.code, Code::ReplayDiverged);
}

// Rank 1 completed an operation that rank 0 has not, and died. Its replacement has only the log of it, and is on the way from 2 to 0.
FT_TEST(replay_hands_on_what_it_has_in_its_log_only) {
    Rig rig(3, replay());
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t a[3] = {1, 2, 4}, b[3] = {10, 20, 40};
    for (int s : kThree) rig.sum(s, a[s]);
    rig.settle();
    rig.hold(1, 0);
    rig.hold(2, 0);
    const auto first = rig.sum(0, b[0]), second = rig.sum(1, b[1]), third = rig.sum(2, b[2]);
    rig.settle();
    EXPECT(!first->done && second->done && third->done);
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.settle();
    rig.hold(1, 0, false);
    rig.hold(2, 0, false);
    rig.restart(1);
    rig.settle();
    rig.join_comm(1, kThree, Rig::kComm, Policy::Replay);
    rig.settle();
    REQUIRE(first->done);
    EXPECT_EQ(b[0], 70);
}

// An operation without data is all there from the start: told that it is complete elsewhere, a rank logs it all the same.
FT_TEST(replay_logs_what_the_vote_completes) {
    Rig rig(3, replay());
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t unused = 0, a[3] = {1, 2, 4};
    OpDesc nothing;
    nothing.kind = OpKind::AllReduce;
    nothing.dtype = DType::Int64;
    nothing.op = ReduceOp::Sum;
    nothing.recv = &unused;
    const auto post = [&](int s) { return rig.node(s).collective(rig.now(), Rig::kComm, nothing); };
    const auto reborn = [&](int s) {
        rig.kill(s);
        rig.evidence(0, s, Evidence::Pidfd);
        rig.settle();
        rig.restart(s);
        rig.settle();
        rig.join_comm(s, kThree, Rig::kComm, Policy::Replay);
    };
    rig.hold(0, 2);
    rig.hold(1, 2);
    for (int s : kThree) post(s);
    rig.settle();
    rig.kill(2);
    rig.hold(0, 2, false);
    reborn(2);
    rig.settle();
    const auto again = post(2);
    rig.settle();
    EXPECT(!again->done);
    reborn(1);
    rig.hold(1, 2, false);
    rig.settle();
    REQUIRE(again->done && again->status.ok());
    const LogKey results{Rig::kComm, 2, kResults};
    EXPECT_EQ(rig.log(2).streams[results].size(), 1u);
    post(1);
    std::vector<RequestPtr> sums;
    for (int s : kThree) sums.push_back(rig.sum(s, a[s]));
    rig.settle();
    for (const auto& r : sums) EXPECT(r->done && r->status.ok());
    EXPECT_EQ(rig.log(2).streams[results].size(), 2u);
}

// Between hosts a message that a leaver has sent is gone with it: nobody leaves before all are back, and at their end.
FT_TEST(replay_leaves_together) {
    Rig rig(2, replay(false));
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
    Rig rig(2, replay(false));
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    const auto leave = rig.node(1).leave(rig.now());
    rig.settle();
    rig.evidence(0, 1, Evidence::Agent);
    rig.settle();
    REQUIRE(leave->done);
    EXPECT_EQ(leave->status.code, Code::StaleEpoch);
}

// A rank that hears of two admissions at once, one of them not its communicator's, counts attempts as those who saw one after the other.
FT_TEST(replay_attempts_do_not_depend_on_which_admissions_were_seen) {
    Rig rig(3, replay());
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
    Rig rig(4, replay());
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

}  // namespace ftcomm::unit
