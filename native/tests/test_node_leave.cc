// Leaving: a goodbye gets out before its sender's request is done, whatever stands in its way; an exit without it looks like a death (M10).
#include <vector>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

FT_TEST(goodbye_behind_a_full_link_keeps_the_leaver) {
    Rig rig(2);
    const auto leave = rig.node(0).leave(rig.now());
    rig.deliver(0, 1);
    rig.fill(0, 1);
    rig.deliver(1, 0);  // leave: go
    EXPECT(!leave->done);
    EXPECT(!rig.carries(0, 1, FrameKind::Goodbye));
    rig.empty(0, 1);
    EXPECT(leave->done);
    EXPECT(rig.carries(0, 1, FrameKind::Goodbye));
    rig.kill(0);
    rig.settle();
    rig.evidence(1, 0, Evidence::Pidfd);
    rig.settle();
    EXPECT(!rig.removed(1, 0, Evidence::Pidfd));
}

FT_TEST(leaver_that_did_not_run_gives_the_others_their_time) {
    Rig rig(3);
    const auto leave = rig.node(0).leave(rig.now());
    rig.deliver(0, 2);
    rig.jump(5 * Rig::kHeartbeat);
    rig.deliver(2, 0);  // it wakes up, with rank 2's consent to read: before its next tick ...
    EXPECT(!leave->done);
    rig.tick(0);  // ... and after it
    EXPECT(!leave->done);
    rig.advance(Rig::kHeartbeat);
    EXPECT(!leave->done);
    rig.advance(2 * Rig::kHeartbeat);  // rank 1 never answers: its time is over
    EXPECT(leave->done);
}

// Ranks 0 and 1 have the sum, rank 2 lacks rank 1's part. The vote that gives it to rank 2 takes longer than leavers wait.
FT_TEST(leavers_stay_for_a_vote_that_needs_their_result) {
    Rig rig(3);
    rig.comm({0, 1, 2});
    rig.hold(1, 2);
    std::int64_t values[] = {1, 2, 4};
    std::vector<RequestPtr> sums, leaves;
    for (int s : kThree) sums.push_back(rig.sum(s, values[s]));
    rig.settle();
    EXPECT(sums[0]->done && sums[1]->done && !sums[2]->done);
    for (int s : {0, 1}) leaves.push_back(rig.node(s).leave(rig.now()));
    rig.hold_cells(0);
    rig.node(2).revoke(rig.now(), Rig::kComm);
    rig.settle();
    rig.advance(4 * Rig::kHeartbeat);
    for (const auto& leave : leaves) EXPECT(!leave->done);
    rig.hold_cells(0, false);
    rig.hold(1, 2, false);
    while (rig.reach(0) || rig.answer(0)) {}
    rig.deliver_all(0, 2);  // the decision, and nothing of what follows it
    rig.hold(0, 2);
    rig.settle();
    rig.advance(Rig::kHeartbeat / 2);
    EXPECT(!sums[2]->done);  // the others are through, and have given it all
    for (const auto& leave : leaves) EXPECT(!leave->done);
    rig.hold(0, 2, false);
    rig.settle();
    EXPECT(sums[2]->done && sums[2]->status.ok() && values[2] == 7);
    rig.advance(3 * Rig::kHeartbeat);
    for (const auto& leave : leaves) EXPECT(leave->done);
}

FT_TEST(leaver_voted_out_for_leaving_still_says_goodbye) {
    Rig rig(3);
    rig.comm({0, 1, 2});
    const auto leave = rig.node(0).leave(rig.now());
    rig.deliver(0, 1);
    rig.deliver(0, 2);
    rig.deliver(1, 0);
    rig.fill(0, 2);
    rig.deliver(2, 0);
    EXPECT(!leave->done);
    std::int64_t one = 1;
    rig.sum(1, one);  // rank 1 needs the place of rank 0 ...
    rig.deliver_all(0, 1);  // ... and reads its goodbye
    rig.hold(0, 2);
    rig.settle();
    EXPECT(rig.removed(1, 0, Evidence::Left));
    EXPECT(rig.node(0).stale());
    EXPECT(!leave->done);
    rig.empty(0, 2);
    EXPECT(leave->done);
    EXPECT(rig.carries(0, 2, FrameKind::Goodbye));
}

FT_TEST(receive_from_anyone_outlives_a_leave_and_ends_with_the_last) {
    Rig rig(3);
    rig.comm({0, 1, 2});
    std::int64_t a = 0, b = 0;
    const auto pending = rig.node(0).recv(rig.now(), Rig::kComm, &a, sizeof a, kAny, 1);
    const auto strict = rig.node(0).recv(rig.now(), Rig::kComm, &b, sizeof b, kAnyOrFail, 2);
    rig.node(1).leave(rig.now());
    rig.settle();
    EXPECT_EQ(RankSet::of(rig.node(0).comm_failed(Rig::kComm)).text(), "{1}");
    EXPECT(!pending->alarmed && !strict->done);
    EXPECT_EQ(rig.node(0).epoch(), 1u);  // nobody needs the place of rank 1
    rig.node(2).leave(rig.now());
    rig.settle();
    for (const auto& r : {pending, strict}) {
        EXPECT(r->done);
        EXPECT_EQ(r->status.code, Code::PeerFailure);
        EXPECT(r->status.ranks == std::vector<int>({1, 2}));
    }
}

FT_TEST(receive_from_anyone_reports_a_death_and_not_a_leave) {
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    std::int64_t a = 0, b = 0, c = 0;
    const auto pending = rig.node(0).recv(rig.now(), Rig::kComm, &a, sizeof a, kAny, 1);
    const auto strict = rig.node(0).recv(rig.now(), Rig::kComm, &b, sizeof b, kAnyOrFail, 2);
    rig.node(1).leave(rig.now());
    rig.settle();
    rig.kill(2);
    rig.evidence(0, 2, Evidence::Pidfd);
    rig.settle();
    EXPECT(pending->alarmed && !pending->done);
    EXPECT(pending->alarm.ranks == std::vector<int>({2}));
    EXPECT(strict->done);
    EXPECT(strict->status.ranks == std::vector<int>({2}));
    rig.node(0).ack_failed(Rig::kComm, -1);
    EXPECT(!pending->alarmed);
    const auto again = rig.node(0).recv(rig.now(), Rig::kComm, &c, sizeof c, kAnyOrFail, 1);
    EXPECT(!again->done);
    for (int i = 0; i < 2; ++i) {
        const std::int64_t seven = 7;
        rig.node(3).send(rig.now(), Rig::kComm, &seven, sizeof seven, 0, 1);
    }
    rig.settle();
    EXPECT(pending->done && pending->status.ok() && a == 7);
    EXPECT(again->done && again->status.ok() && c == 7);
}

FT_TEST(message_for_a_communicator_made_after_its_sender_died_is_received) {
    Rig rig(3);
    for (int slot : {1, 2}) rig.join_comm(slot, {0, 1, 2});
    const std::int64_t five = 5;
    rig.node(1).send(rig.now(), Rig::kComm, &five, sizeof five, 0, 1);
    rig.settle();
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.settle();
    EXPECT_EQ(rig.node(0).epoch(), 2u);
    rig.join_comm(0, {0, 1, 2});
    std::int64_t got = 0;
    const auto first = rig.node(0).recv(rig.now(), Rig::kComm, &got, sizeof got, 1, 1);
    EXPECT(first->done && first->status.ok() && got == 5);
    const auto second = rig.node(0).recv(rig.now(), Rig::kComm, &got, sizeof got, 1, 1);
    EXPECT(second->done);
    EXPECT_EQ(second->status.code, Code::PeerFailure);
}

}  // namespace ftcomm::unit
