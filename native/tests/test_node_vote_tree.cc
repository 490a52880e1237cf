// Votes after a death come to the leader along a tree where voters are many.
#include "collectives/records.h"
#include "tests/many_ranks.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

struct Voters : ManyRanks {
    // The votes that are under way: how many different ones, and whose.
    std::pair<std::size_t, RankSet> votes(int from, int to) {
        const auto payload = rig.last_sent(from, to, FrameKind::Votes);
        ByteReader r(payload);
        decode_spec(r);
        const auto body = r.bytes();
        ByteReader list(body);
        const auto n = list.count(8);
        RankSet ranks;
        for (std::uint32_t i = 0; i < n; ++i) {
            ranks = ranks | list.ranks();
            list.bytes();
        }
        EXPECT(r.ok() && list.done());
        return {n, ranks};
    }
};

}  // namespace

FT_TEST(votes_of_many_come_through_those_below_the_leader) {
    Voters v;
    v.rig.comm(v.all);
    for (int s : v.all)
        if (s != 0) v.rig.hold(s, 0);
    v.die(8);
    // With 8 left: 0 <- 1, 4; 1 <- 2, 3; 4 <- 5, 6; 6 <- 7.
    for (int s : {2, 3, 5, 6, 7}) EXPECT(!v.rig.carries(s, 0, FrameKind::Vote) && !v.rig.carries(s, 0, FrameKind::Votes));
    const auto [left, left_ranks] = v.votes(1, 0);
    const auto [right, right_ranks] = v.votes(4, 0);
    EXPECT_EQ(left, 1u);  // they say the same
    EXPECT_EQ(right, 1u);
    EXPECT_EQ(left_ranks.text(), "{1,2,3}");
    EXPECT_EQ(right_ranks.text(), "{4,5,6,7}");
    for (int s : v.all) v.rig.hold(s, 0, false);
    v.rig.settle();
    std::int64_t value[Voters::kRanks];
    std::vector<RequestPtr> requests;
    for (int s : v.all)
        if (s != 8) requests.push_back(v.rig.sum(s, value[s] = 1));
    v.rig.settle();
    for (const auto& r : requests) EXPECT(r->done && r->status.ok());
    EXPECT_EQ(value[0], 8);
}

// Rank 4 alone has made the communicator: nobody below it votes, and nobody above it knows that there is something to vote on.
FT_TEST(who_waits_for_votes_from_below_tells_the_leader) {
    Voters v;
    v.rig.join_comm(4, v.all);
    v.die(8);
    EXPECT(!v.rig.traced(0, "decide"));
    v.pass_ticks(4);
    EXPECT(v.rig.traced(4, "votes.hurried"));
    EXPECT(v.rig.traced(0, "decide"));
}

// Rank 4 wishes for something when its vote is on its way already: the leader gets the wish first, and the vote without it does not undo it.
FT_TEST(wish_that_overtakes_its_vote_counts) {
    Voters v;
    v.rig.comm(v.all);
    v.rig.hold(1, 0);
    v.die(8);
    v.rig.node(3).revoke(v.rig.now(), Rig::kComm);
    v.rig.settle();
    EXPECT(!v.rig.node(0).comm_revoked(Rig::kComm));
    v.let_go(1, 0);
    for (int s : v.all)
        if (s != 8) EXPECT(v.rig.node(s).comm_revoked(Rig::kComm));
    EXPECT_EQ(v.rig.decisions(0), 1u);
}

// Rank 1 gets no vote through, as one that is out of a view which rank 2 has missed; a plain vote counts all the same.
FT_TEST(who_is_frozen_for_long_votes_straight) {
    Voters v;
    v.rig.comm(v.all);
    v.rig.hold(1, 0);
    v.die(8);
    v.rig.hold(2, 0);
    v.pass_ticks(15);
    EXPECT(v.rig.carries(2, 0, FrameKind::Vote));
    EXPECT(!v.rig.traced(0, "decide"));
    v.let_go(2, 0);
    v.let_go(1, 0);
    EXPECT_EQ(v.rig.decisions(0), 1u);
}

}  // namespace ftcomm::unit
