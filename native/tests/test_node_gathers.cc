// Small broadcasts and barriers, which have no fence, where ranks die in them again and again, or never enter.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

RequestPtr broadcast(Rig& rig, int slot, std::int64_t& value, Algorithm algorithm) {
    OpDesc d;
    d.kind = OpKind::Broadcast;
    d.dtype = DType::Int64;
    d.count = 1;
    d.algorithm = algorithm;
    d.recv = &value;
    return rig.node(slot).collective(rig.now(), Rig::kComm, d);
}

// Rank 2 never enters. Rank 1 dies twice in the operation, the second time when it may have its data. Then it is given up.
void nobody_waits_for_ever(bool one_host, Algorithm algorithm, bool revoke) {
    Rig::Setup setup;
    setup.replay = true;
    setup.one_host = one_host;
    setup.timeout = 10 * Rig::kHeartbeat;
    Rig rig(3, setup);
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t before[3] = {1, 2, 4}, word[3] = {9, 0, 0};
    for (int slot : kThree) rig.sum(slot, before[slot]);
    rig.settle();
    const auto root = broadcast(rig, 0, word[0], algorithm);
    auto other = broadcast(rig, 1, word[1], algorithm);
    for (int deaths = 0; deaths < 2; ++deaths) {
        rig.settle();
        rig.replace(1, 0, kThree);
        rig.settle();
        std::int64_t again = 2;
        rig.sum(1, again);
        rig.settle();
        EXPECT_EQ(again, 7);
        word[1] = 0;
        other = broadcast(rig, 1, word[1], algorithm);
        rig.settle();
        EXPECT(!root->done && !other->done);
    }
    if (revoke) rig.node(2).revoke(rig.now(), Rig::kComm);
    for (int i = 0; i < 30; ++i) {
        rig.settle();
        rig.advance(Rig::kHeartbeat);
    }
    const auto why = revoke ? Code::Revoked : Code::Timeout;
    EXPECT(root->done && root->status.code == why);
    EXPECT(other->done && other->status.code == why);
}

}  // namespace

FT_TEST(broadcast_that_a_rank_never_enters_can_be_given_up_after_two_deaths) {
    for (bool one_host : {false, true})
        for (auto algorithm : {Algorithm::Auto, Algorithm::Ring})
            for (bool revoke : {false, true}) nobody_waits_for_ever(one_host, algorithm, revoke);
}

// Whatever a caller of the C interface says of a barrier's size.
FT_TEST(barrier_has_no_data_to_keep) {
    Rig::Setup setup;
    setup.replay = true;
    setup.timeout = 10 * Rig::kHeartbeat;
    Rig rig(3, setup);
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    OpDesc d;
    d.kind = OpKind::Barrier;
    d.count = 64;
    rig.hold(1, 0);
    std::vector<RequestPtr> requests;
    for (int slot : kThree) requests.push_back(rig.node(slot).collective(rig.now(), Rig::kComm, d));
    rig.settle();
    EXPECT(!requests[0]->done && requests[1]->done && requests[2]->done);
    rig.node(0).fail_request(rig.now(), requests[0], Code::Timeout);
    rig.settle();
    rig.hold(1, 0, false);
    rig.settle();
    EXPECT(requests[0]->done && requests[0]->status.ok());
}

}  // namespace ftcomm::unit
