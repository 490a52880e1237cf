// What a rank says in a vote.
#include "collectives/records.h"
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

std::vector<std::uint64_t> operations_in(const Bytes& payload) {
    ByteReader r(payload);
    decode_spec(r);
    ByteReader body(r.bytes());
    const auto vote = Vote::decode(body);
    std::vector<std::uint64_t> out;
    if (vote.has_value())
        for (const auto& op : vote->ops) out.push_back(op.seq);
    return out;
}

}  // namespace

// Ranks 0 and 1 have finished operation 1 and are in operation 2; rank 2 needs operation 1 from them, since rank 3 died.
FT_TEST(operation_that_waits_for_a_hand_out_of_the_one_before_is_in_the_vote) {
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    rig.hold(3, 2);
    std::int64_t values[4] = {1, 2, 4, 8}, next[2] = {1, 2};
    RequestPtr sums[4];
    for (int s : {0, 1, 2, 3}) sums[s] = rig.sum(s, values[s]);
    rig.settle();
    REQUIRE(sums[0]->done && sums[1]->done && !sums[2]->done);
    for (int s : {0, 1}) rig.sum(s, next[s]);
    rig.settle();
    rig.hold(0, 2);
    rig.hold(1, 2);
    rig.kill(3);
    rig.evidence(0, 3, Evidence::Pidfd);
    rig.settle();
    rig.deliver_all(0, 2);  // the view: it votes
    rig.settle();
    REQUIRE(rig.traced(1, "hand_out.kept"));
    REQUIRE(!sums[2]->done);
    rig.hold(1, 0);
    rig.node(1).revoke(rig.now(), Rig::kComm);
    const auto vote = rig.last_sent(1, 0, FrameKind::Vote);
    EXPECT(operations_in(vote) == std::vector<std::uint64_t>({1, 2}));
    for (auto [from, to] : {std::pair{1, 0}, {0, 2}, {1, 2}}) rig.hold(from, to, false);
    rig.settle();
    EXPECT(sums[2]->done && sums[2]->status.ok());
    EXPECT_EQ(values[2], 15);
}

}  // namespace ftcomm::unit
