// Views and records along trees: what a rank on the way does not pass on, and who knows whom. (The schedules come from the simulator.)
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

Rig::Setup trees_of(int degree) {
    Rig::Setup setup;
    setup.spread_degree = degree;
    return setup;
}

std::string alive(Rig& rig, int slot) { return rig.node(slot).alive_slots().text(); }

void expect_all_agreed(const std::vector<RequestPtr>& asked, std::int64_t value) {
    for (const auto& r : asked) {
        REQUIRE(r->done);
        EXPECT(r->status.ok());
        EXPECT_EQ(r->value, value);
    }
}

// Rank 4 is out. Rank 1 has ended with the view that says so on its way to ranks 2 and 3, and nobody has noticed.
struct Lagging {
    Rig rig{5, trees_of(1)};
    const std::vector<int> members{0, 2, 3};
    Lagging() {
        for (int s : members) rig.join_comm(s, members);
        rig.kill(1);
        rig.kill(4);
        rig.evidence(0, 4, Evidence::Pidfd);
        rig.settle();
        EXPECT_EQ(alive(rig, 0), "{0,1,2,3}");
        for (int s : {2, 3}) EXPECT_EQ(alive(rig, s), "{0,1,2,3,4}");
    }
};

}  // namespace

// Rank 2 has lost the compare-and-set, and tells the winner, who knows its own view: the answer may be lost, and is not waited for.
FT_TEST(winner_of_a_view_tells_all_once_it_hears_of_it) {
    Rig rig(4, trees_of(1));
    for (int s : {0, 2}) rig.hold_cells(s);
    rig.kill(3);
    for (int s : {0, 2}) rig.evidence(s, 3, Evidence::Pidfd);
    REQUIRE(rig.reach(0) && rig.reach(2) && rig.answer(2));
    rig.settle();
    for (int s : {0, 1, 2}) EXPECT_EQ(alive(rig, s), "{0,1,2}");
    rig.hold_cells(0, false);
    rig.settle();
    EXPECT_EQ(rig.in_flight(0, 1), 0u);
}

// Those who have lost tell no more than a tree's degree, or all together would send the square of their number.
FT_TEST(loser_of_a_view_tells_some) {
    Rig rig(6, trees_of(2));
    for (int s : {0, 2}) rig.hold_cells(s);
    rig.kill(5);
    for (int s : {0, 2}) rig.evidence(s, 5, Evidence::Pidfd);
    REQUIRE(rig.reach(0) && rig.reach(2) && rig.answer(2));
    rig.settle();
    for (int s : {2, 3, 4}) EXPECT_EQ(alive(rig, s), "{0,1,2,3,4}");
    for (int s : {0, 1}) EXPECT_EQ(alive(rig, s), "{0,1,2,3,4,5}");
    rig.hold_cells(0, false);
    rig.settle();
    for (int s : {0, 1}) EXPECT_EQ(alive(rig, s), "{0,1,2,3,4}");
}

// Rank 2 dies with the view in which rank 1 came in, so rank 3 does not know rank 1, and can't hear of the next view from it.
FT_TEST(view_is_passed_on_by_who_was_there_before) {
    Rig rig(4, trees_of(1));
    rig.ask_again(1, 0);
    for (int s : {0, 2, 3}) rig.node(s).admit(rig.now());
    rig.hold(0, 2);
    rig.settle();
    EXPECT_EQ(alive(rig, 1), "{0,1,2,3}");
    EXPECT_EQ(alive(rig, 3), "{0,2,3}");
    rig.kill(2);
    rig.evidence(0, 2, Evidence::Pidfd);
    rig.settle();
    EXPECT_EQ(alive(rig, 3), "{0,1,3}");
    EXPECT_EQ(alive(rig, 1), "{0,1,3}");
}

// Rank 3 is to pass the call to vote on to rank 5, which it does not know yet.
FT_TEST(record_is_passed_on_in_the_view_of_who_sent_it) {
    Rig rig(6, trees_of(1));
    rig.ask_again(5, 0);
    const std::vector<int> members{1, 3, 4, 5};
    for (int s : {1, 3, 4}) rig.join_comm(s, members);
    for (int s : {0, 1, 2, 3, 4}) rig.node(s).admit(rig.now());
    rig.hold(2, 3);
    rig.settle();
    rig.join_comm(5, members);
    EXPECT_EQ(alive(rig, 1), "{0,1,2,3,4,5}");
    EXPECT_EQ(alive(rig, 3), "{0,1,2,3,4}");
    rig.node(1).revoke(rig.now(), Rig::kComm);
    rig.settle();
    EXPECT(rig.traced(3, "spread.held"));
    EXPECT(!rig.node(5).comm_revoked(Rig::kComm));
    rig.hold(2, 3, false);
    rig.settle();
    for (int s : members) EXPECT(rig.node(s).comm_revoked(Rig::kComm));
}

// The votes for an agree come through rank 1, which dies with them; and the result, on its way to rank 3, with rank 2.
FT_TEST(agree_does_not_need_those_on_the_way) {
    Rig rig(4, trees_of(1));
    rig.comm({0, 1, 2, 3});
    rig.hold(1, 0);
    std::vector<RequestPtr> asked;
    for (int s = 0; s < 4; ++s) asked.push_back(rig.node(s).agree(rig.now(), Rig::kComm, ~(1 << s)));
    rig.settle();
    REQUIRE(rig.carries(1, 0, FrameKind::AgreeVote));
    EXPECT(!rig.carries(2, 0, FrameKind::AgreeVote));
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.hold(2, 3);
    rig.settle();
    REQUIRE(asked[0]->done && asked[2]->done);
    EXPECT(!asked[3]->done);
    rig.kill(2);
    rig.evidence(0, 2, Evidence::Pidfd);
    rig.settle();
    REQUIRE(asked[3]->done);
    for (int s : {0, 3}) EXPECT_EQ(asked[static_cast<std::size_t>(s)]->value, asked[2]->value);
}

// Slot 3 hears of the newcomer's vote, by slot 1, before it hears of the newcomer.
FT_TEST(vote_that_comes_before_its_view_is_kept) {
    Rig rig(5, trees_of(1));
    rig.ask_again(4, 0);
    const std::vector<int> members{3, 1, 4};
    for (int s : {3, 1}) rig.join_comm(s, members);
    for (int s : {0, 1, 2, 3}) rig.node(s).admit(rig.now());
    rig.hold(2, 3);
    rig.settle();
    rig.join_comm(4, members);
    std::vector<RequestPtr> asked;
    for (int s : {4, 1}) asked.push_back(rig.node(s).agree(rig.now(), Rig::kComm, 8 + s));
    rig.settle();
    EXPECT_EQ(alive(rig, 3), "{0,1,2,3}");
    EXPECT(rig.traced(3, "agree.votes_held"));
    rig.hold(2, 3, false);
    rig.settle();
    asked.push_back(rig.node(3).agree(rig.now(), Rig::kComm, 15));
    rig.settle();
    expect_all_agreed(asked, 8);
}

// Who hears from them tells them.
FT_TEST(vote_from_an_older_view_is_answered_with_the_view) {
    Lagging job;
    auto& rig = job.rig;
    std::vector<RequestPtr> asked;
    for (int s : job.members) asked.push_back(rig.node(s).agree(rig.now(), Rig::kComm, 8 + s));
    rig.settle();
    EXPECT(rig.traced(0, "agree.votes_outdated"));
    expect_all_agreed(asked, 8);
}

// Rank 2 hears a record from the view that it lacks.
FT_TEST(record_that_is_held_for_long_makes_its_holder_look_for_the_view) {
    Lagging job;
    auto& rig = job.rig;
    rig.node(0).revoke(rig.now(), Rig::kComm);
    rig.settle();
    EXPECT(rig.traced(2, "spread.held"));
    EXPECT(!rig.node(3).comm_revoked(Rig::kComm));
    rig.advance(Rig::kHeartbeat / 10, {1, 4});
    rig.settle();
    for (int s : job.members) EXPECT(rig.node(s).comm_revoked(Rig::kComm));
}

// Posted by another thread, after its rank has said that nothing is under way.
FT_TEST(agree_during_an_admission_is_one_with_the_newcomers) {
    Rig rig(3);
    rig.comm({0, 1, 2});
    rig.ask_again(2, 0);
    rig.hold_cells(0);
    for (int s : {0, 1}) rig.node(s).admit(rig.now());
    rig.settle();
    std::vector<RequestPtr> asked;
    for (int s : {0, 1}) asked.push_back(rig.node(s).agree(rig.now(), Rig::kComm, 8 + 4 + s));
    rig.settle();
    EXPECT(rig.reach(0));
    EXPECT_EQ(rig.asked(0), 0u);  // the admission, and no agree
    rig.hold_cells(0, false);
    rig.settle();
    for (const auto& r : asked) EXPECT(!r->done);
    rig.join_comm(2, {0, 1, 2});
    asked.push_back(rig.node(2).agree(rig.now(), Rig::kComm, 8));
    rig.settle();
    expect_all_agreed(asked, 8);
}

// Rank 3's vote for the next agree is here before rank 1 has heard how this one ended: nothing is asked of the cell for that.
FT_TEST(vote_that_is_ahead_waits_on_its_way) {
    Rig rig(4, trees_of(1));
    rig.comm({0, 1, 2, 3});
    std::vector<RequestPtr> asked;
    for (int s = 0; s < 4; ++s) asked.push_back(rig.node(s).agree(rig.now(), Rig::kComm, s));
    rig.settle();
    for (const auto& r : asked) REQUIRE(r->done);
    for (int s : {3, 2, 1}) asked[static_cast<std::size_t>(s)] = rig.node(s).agree(rig.now(), Rig::kComm, 8 + s);
    rig.settle();
    EXPECT(!asked[3]->done);
    EXPECT_EQ(rig.asked(1), 0u);
    asked[0] = rig.node(0).agree(rig.now(), Rig::kComm, 8);
    rig.settle();
    expect_all_agreed(asked, 8);
}

}  // namespace ftcomm::unit
