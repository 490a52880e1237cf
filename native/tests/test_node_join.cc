// Replacements: deaths around their admission, and what survivors have posted or decided when they come in (M13).
#include <algorithm>
#include <vector>

#include "collectives/records.h"
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

// The evidence comes once, to one rank, before this rank has heard of the admission.
FT_TEST(death_of_a_replacement_before_its_admission_is_not_forgotten) {
    Rig rig(3);
    rig.comm({0, 1, 2});
    rig.ask_again(2, 0);
    rig.node(1).admit(rig.now());
    rig.node(0).admit(rig.now());
    rig.hold(0, 1);
    rig.settle();
    EXPECT_EQ(rig.node(0).alive_slots().text(), "{0,1,2}");
    rig.kill(2);
    rig.evidence(1, 2, Evidence::Pidfd);
    rig.hold(0, 1, false);
    rig.settle();
    EXPECT(rig.traced(1, "join.dead_early"));
    EXPECT_EQ(rig.node(0).alive_slots().text(), "{0,1}");
    std::int64_t x = 1, y = 2;
    const auto a = rig.sum(0, x), b = rig.sum(1, y);
    rig.settle();
    EXPECT(a->done && x == 3);
    EXPECT(b->done && y == 3);
}

// A decision that is made while an admission is on its way has the number after the last one; so must nothing after the admission have.
FT_TEST(attempts_after_an_admission_are_none_from_before) {
    Rig rig(3);
    rig.comm({0, 1, 2});
    rig.ask_again(2, 0);
    const auto before = rig.last_decided(0);
    for (int s : {0, 1}) rig.node(s).admit(rig.now());
    rig.settle();
    EXPECT_EQ(rig.node(0).alive_slots().text(), "{0,1,2}");
    rig.node(1).revoke(rig.now(), Rig::kComm);
    rig.settle();
    EXPECT_EQ(before, 1u);
    EXPECT_EQ(rig.last_decided(0), first_attempt(1) + 1);
}

// Ranks 0 and 3 have voted for the admission when they make another communicator with the newcomer, see that it is not there yet, and decide
// to go on without it. Rank 0 has an operation in line by then, rank 3 has none.
FT_TEST(communicator_made_during_an_admission_begins_anew_for_all) {
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    rig.ask_again(2, 0);
    rig.join_comm(2, {0, 1, 2, 3});
    for (int s : {0, 3}) rig.node(s).admit(rig.now());
    rig.settle();
    for (int s : {0, 3}) rig.join_comm(s, {0, 2, 3}, 9);
    rig.settle();
    std::int64_t x[4] = {1, 0, 4, 8};
    std::vector<RequestPtr> sums{rig.sum(0, x[0], 9)};
    rig.node(1).admit(rig.now());
    rig.settle();
    REQUIRE(rig.node(0).alive_slots().count() == 4);
    rig.join_comm(2, {0, 2, 3}, 9);
    for (int s : {2, 3}) sums.push_back(rig.sum(s, x[s], 9));
    rig.settle();
    for (const auto& sum : sums) EXPECT(sum->done && sum->status.ok());
    for (int s : {0, 2, 3}) EXPECT_EQ(x[s], 13);
    // Agreements are counted anew, too.
    std::vector<RequestPtr> agrees;
    for (int s : {0, 2, 3}) agrees.push_back(rig.node(s).agree(rig.now(), 9, 1));
    rig.settle();
    for (const auto& agree : agrees) EXPECT(agree->done && agree->status.ok());
}

// Rank 2 learns of the death and of the replacement from one record.
FT_TEST(receive_from_the_predecessor_ends_when_its_replacement_is_in) {
    Rig rig(3);
    rig.comm({1, 2});
    std::int64_t got = 0;
    const auto recv = rig.node(2).recv(rig.now(), Rig::kComm, &got, sizeof got, 0, 0);
    rig.node(2).admit(rig.now());
    rig.settle();
    rig.hold(0, 2);
    rig.hold(1, 2);
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.settle();
    rig.restart(1);
    rig.settle();
    rig.node(0).admit(rig.now());
    rig.settle();
    EXPECT_EQ(rig.node(0).epoch(), 3u);
    EXPECT_EQ(rig.node(2).epoch(), 1u);
    EXPECT(!recv->done);
    rig.jump(Rig::kHeartbeat);
    rig.tick(2);  // it was not running: it reads the cell
    rig.settle();
    EXPECT_EQ(rig.node(2).incarnation_of(1), 1u);
    REQUIRE(recv->done);
    EXPECT_EQ(recv->status.code, Code::PeerFailure);
}

// The same of two at once, the first of which had begun a message that goes to a receive from ANY, and the second of which showed the next one:
// its predecessor's memory is not to be looked for in the replacement, at whose address there may be something else.
FT_TEST(what_the_predecessors_showed_is_not_read_when_their_replacements_are_in) {
    for (const bool second_is_back : {true, false}) {
        Rig::Setup setup;
        setup.reads = true;
        setup.eager_limit = 16;
        Rig rig(4, setup);
        rig.comm({1, 2, 3});
        std::vector<std::int64_t> first(100, 1), second(8, 2), got(100, 0);  // read in parts, and at once
        const auto recv = rig.node(3).recv(rig.now(), Rig::kComm, got.data(), 8 * got.size(), kAny, 1);
        rig.node(1).send(rig.now(), Rig::kComm, first.data(), 8 * first.size(), 2, 1);
        rig.settle();
        rig.node(2).send(rig.now(), Rig::kComm, second.data(), 8 * second.size(), 2, 1);
        rig.settle();
        rig.node(3).admit(rig.now());
        rig.settle();
        for (int from : {0, 1, 2}) rig.hold(from, 3);
        for (int dying : {1, 2}) rig.kill(dying);
        for (int dying : {1, 2}) rig.evidence(0, dying, Evidence::Pidfd);
        rig.settle();
        for (int s : {1, 2})
            if (s == 1 || second_is_back) rig.restart(s);
        rig.settle();
        rig.node(0).admit(rig.now());
        rig.settle();
        EXPECT_EQ(rig.node(3).epoch(), 1u);
        rig.jump(Rig::kHeartbeat);
        rig.tick(3);
        rig.settle();
        while (rig.work(3)) rig.settle();
        EXPECT_EQ(rig.node(3).incarnation_of(1), 1u);
        REQUIRE(recv->done);  // as if it had heard of the deaths before: nobody was left who could send
        EXPECT_EQ(recv->status.code, Code::PeerFailure);
        EXPECT(std::ranges::find(got, 2) == got.end());
    }
}

// Both members of a communicator die and are replaced; its cell holds a decision of the dead.
FT_TEST(record_of_members_since_replaced_does_not_block_their_successors) {
    Rig rig(4);
    rig.comm({1, 2, 3});
    rig.kill(3);
    rig.evidence(1, 3, Evidence::Pidfd);
    rig.settle();  // recorded: attempt 1 without slot 3
    for (int s : {1, 2}) {
        rig.kill(s);
        rig.evidence(0, s, Evidence::Pidfd);
    }
    rig.settle();
    for (int s : {1, 2, 3}) rig.restart(s);
    rig.settle();
    const auto admit = rig.node(0).admit(rig.now());
    rig.settle();
    REQUIRE(admit->done);
    REQUIRE(rig.node(0).alive_slots().count() == 4);
    rig.comm({1, 2, 3});
    std::int64_t x = 1, y = 2;
    const auto a = rig.sum(1, x), b = rig.sum(2, y);
    rig.kill(3);
    rig.evidence(1, 3, Evidence::Pidfd);
    rig.settle();
    EXPECT(rig.traced(1, "decide.outdated"));
    EXPECT(a->done && a->status.ok() && x == 3);
    EXPECT(b->done && b->status.ok() && y == 3);
}

// Rank 2 hears of the admission from rank 1 and goes on to a vote, which reaches the leader before the cell's answer does.
FT_TEST(vote_for_the_attempt_after_an_admission_is_kept_by_a_leader_that_is_behind) {
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    rig.ask_again(3, 0);
    rig.join_comm(3, {0, 1, 2, 3});
    rig.hold_cells(0);
    for (int s : {0, 1, 2}) rig.node(s).admit(rig.now());
    rig.settle();
    REQUIRE(rig.asked(0) == 1);
    rig.reach(0);
    rig.hold(1, 0);
    rig.jump(Rig::kHeartbeat);
    rig.tick(1);  // it was not running: it reads the cell
    rig.settle();
    REQUIRE(rig.node(2).alive_slots().has(3));
    rig.node(2).revoke(rig.now(), Rig::kComm);
    rig.settle();
    EXPECT(rig.traced(0, "vote.ahead"));
    EXPECT(!rig.node(0).alive_slots().has(3));
    rig.hold_cells(0, false);
    rig.settle();
    rig.hold(1, 0, false);
    rig.settle();
    for (int s : {0, 1, 2, 3}) EXPECT(rig.node(s).comm_revoked(Rig::kComm));
}

// All admission votes are on their way when rank 1 revokes. Both go to the cells at once, and the revocation takes effect first.
FT_TEST(revoke_decided_too_late_for_the_admission_counts_after_it) {
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    rig.ask_again(3, 0);
    rig.join_comm(3, {0, 1, 2, 3});
    rig.hold(2, 0);
    for (int s : {0, 1, 2}) rig.node(s).admit(rig.now());
    rig.settle();
    rig.node(1).revoke(rig.now(), Rig::kComm);
    rig.settle();
    rig.hold_cells(0);
    rig.hold(2, 0, false);
    rig.settle();
    REQUIRE(rig.asked(0) == 2);  // admission, revocation
    rig.reach(0, 1);
    rig.answer(0);
    EXPECT(rig.node(0).comm_revoked(Rig::kComm));
    rig.hold_cells(0, false);
    rig.settle();
    EXPECT(rig.traced(0, "admission.revoke_again"));
    for (int s : {0, 1, 2, 3}) EXPECT(rig.node(s).comm_revoked(Rig::kComm));
}

FT_TEST(operation_queued_before_a_join_point_still_starts) {
    Rig rig(3);
    rig.comm({0, 1, 2});
    rig.ask_again(2, 0);
    std::int64_t values[2][2] = {{1, 10}, {2, 20}};
    RequestPtr sums[2][2], admits[2];
    for (int s : {0, 1})
        for (int i : {0, 1}) sums[s][i] = rig.sum(s, values[s][i]);
    for (int s : {0, 1}) admits[s] = rig.node(s).admit(rig.now());
    rig.settle();
    for (int s : {0, 1}) {
        EXPECT(admits[s]->done);
        for (int i : {0, 1}) EXPECT(sums[s][i]->done && sums[s][i]->status.ok());
        EXPECT_EQ(values[s][0], 3);
        EXPECT_EQ(values[s][1], 30);
    }
}

// Only rank 0 has posted what comes after the join point when the newcomer comes in.
FT_TEST(operations_posted_during_an_admission_take_the_numbers_after_it) {
    Rig rig(3);
    rig.comm({0, 1, 2});
    rig.ask_again(2, 0);
    rig.join_comm(2, {0, 1, 2});
    std::int64_t prologue = 5;
    EXPECT(rig.sum(2, prologue)->done);  // alone
    std::int64_t values[3][2] = {{1, 10}, {2, 20}, {4, 40}};
    RequestPtr sums[3][2];
    rig.node(0).admit(rig.now());
    sums[0][0] = rig.sum(0, values[0][0]);  // waits for the newcomer
    rig.settle();
    EXPECT(!sums[0][0]->done);
    const auto admit = rig.node(1).admit(rig.now());
    rig.settle();
    REQUIRE(admit->done);
    sums[0][1] = rig.sum(0, values[0][1]);
    for (int s : {1, 2})
        for (int i : {0, 1}) sums[s][i] = rig.sum(s, values[s][i]);
    rig.settle();
    for (int s : {0, 1, 2}) {
        for (int i : {0, 1}) EXPECT(sums[s][i]->done && sums[s][i]->status.ok());
        EXPECT_EQ(values[s][0], 7);
        EXPECT_EQ(values[s][1], 70);
    }
}

}  // namespace ftcomm::unit
