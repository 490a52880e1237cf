// Of each rank the vote that counts, whichever way it came.
#include "communicator/ballot.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

Vote vote(std::uint32_t attempt, std::size_t proposals = 0) {
    Vote v;
    v.attempt = attempt;
    v.proposals.assign(proposals, {Code::Timeout, 1});
    return v;
}

}  // namespace

FT_TEST(ballot_counts_votes_for_one_attempt) {
    Ballot ballot;
    ballot.take(0, vote(1));
    ballot.take(1, vote(2));
    ballot.take(2, vote(2));
    EXPECT_EQ(ballot.voters(2).text(), "{1,2}");
    EXPECT(ballot.find(0, 2) == nullptr);
    EXPECT_EQ(ballot.of(RankSet::first(2), 2).size(), 1u);
    ballot.forget_through(1);
    EXPECT(ballot.voters(1).empty());
    ballot.forget(1);
    EXPECT_EQ(ballot.voters(2).text(), "{2}");
}

FT_TEST(ballot_keeps_what_a_rank_has_said_since_by_itself) {
    Ballot ballot;
    ballot.take(3, vote(2, 1));
    ballot.take_passed_on(3, vote(2));  // on its way for longer
    EXPECT_EQ(ballot.find(3, 2)->proposals.size(), 1u);
    ballot.take_passed_on(3, vote(2, 2));
    EXPECT_EQ(ballot.find(3, 2)->proposals.size(), 2u);
    ballot.take_passed_on(3, vote(3));  // of the next attempt
    EXPECT(ballot.find(3, 3) != nullptr);
}

}  // namespace ftcomm::unit
