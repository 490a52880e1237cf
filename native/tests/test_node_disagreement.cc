// Ranks that call different operations, where one of them fails at once: its root is dead.
#include "collectives/seq_runs.h"
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

RequestPtr broadcast(Rig& rig, int slot, int root, std::int64_t& word) {
    OpDesc d;
    d.kind = OpKind::Broadcast;
    d.dtype = DType::Int64;
    d.count = 1;
    d.root = root;
    d.recv = &word;
    return rig.node(slot).collective(rig.now(), Rig::kComm, d);
}

void kills(Rig& rig, int slot, const std::vector<int>& observers) {
    rig.kill(slot);
    for (int s : observers) rig.evidence(s, slot, Evidence::Pidfd);
    rig.settle();
}

}  // namespace

// Rank 2 calls something that fails at once, another death is decided, and rank 1 runs something else in the new attempt. What it sends
// comes before the decision does, and nobody else says anything.
FT_TEST(disagreement_that_comes_before_its_attempt_is_seen) {
    Rig rig(5);
    rig.comm({0, 1, 2, 3, 4});
    rig.evidence(3, 4, Evidence::Pidfd);
    kills(rig, 4, {0, 1, 2});
    std::int64_t word = 0, one = 1;
    for (int s : {0, 2}) EXPECT(broadcast(rig, s, 4, word)->status.code == Code::PeerFailure);
    rig.hold(0, 2);
    kills(rig, 3, {0, 1, 2});
    rig.hold(1, 0);
    const auto sum = rig.sum(1, one);
    rig.settle();
    EXPECT(!rig.traced(2, "mismatch.late"));
    rig.hold(0, 2, false);
    rig.settle();
    EXPECT(rig.traced(2, "mismatch.late"));
    rig.hold(1, 0, false);
    rig.settle();
    EXPECT(sum->done && sum->status.code == Code::Mismatch);
}

// This rank has gone on, and is in the next operation.
FT_TEST(disagreement_is_seen_in_a_later_operation) {
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    kills(rig, 3, {0, 1, 2});
    std::int64_t word = 7, other = 0, one = 1;
    EXPECT(broadcast(rig, 2, 3, word)->status.code == Code::PeerFailure);
    const auto next = broadcast(rig, 2, 2, word);
    const auto sum = rig.sum(1, one);
    rig.settle();
    EXPECT(sum->done && sum->status.code == Code::Mismatch);
    EXPECT(broadcast(rig, 0, 3, word)->status.code == Code::Mismatch);  // as decided
    const RequestPtr all[] = {next, broadcast(rig, 0, 2, other), broadcast(rig, 1, 2, one)};
    rig.settle();
    for (const auto& r : all) EXPECT(r->done && r->status.ok());
    EXPECT(one == 7 && other == 7);
}

// Found in the simulator (seed 119898): what came after it ran and was revoked.
FT_TEST(disagreement_is_seen_after_a_later_operation_that_was_revoked) {
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    kills(rig, 3, {0, 1, 2});
    std::int64_t word = 7, ones[2] = {1, 1};
    EXPECT(broadcast(rig, 2, 3, word)->status.code == Code::PeerFailure);
    const auto revoked = rig.sum(2, ones[0]);
    rig.settle();
    rig.node(2).revoke(rig.now(), Rig::kComm);
    rig.settle();
    REQUIRE(revoked->done && revoked->status.code == Code::Revoked);
    const auto late = rig.sum(1, ones[1]);
    rig.settle();
    EXPECT(late->done && late->status.code == Code::Mismatch);
}

FT_TEST(numbers_in_runs_keep_the_latest) {
    SeqRuns runs;
    for (std::uint64_t seq = 1; seq <= 3; ++seq) runs.add(seq);
    for (std::uint64_t i = 0; i < SeqRuns::kMost; ++i) runs.add(10 + 2 * i);
    EXPECT(!runs.has(3) && runs.has(10) && !runs.has(11));
    ByteWriter w;
    runs.encode(w);
    const auto bytes = w.take();
    ByteReader r(bytes);
    const auto same = SeqRuns::decode(r);
    EXPECT(r.ok() && r.done());
    EXPECT(same.has(8 + 2 * SeqRuns::kMost) && same.has(10) && !same.has(9 + 2 * SeqRuns::kMost));
}

}  // namespace ftcomm::unit
