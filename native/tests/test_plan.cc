// Decisions as a pure function of votes.
#include "collectives/plan.h"

#include <utility>

#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

CommSpec world(std::vector<int> members, Policy policy) {
    CommSpec spec;
    spec.id = 100;
    spec.name = "world";
    spec.members = std::move(members);
    spec.policy = policy;
    return spec;
}

}  // namespace

// Operation 2 was given up: a revocation, while only a rank that has died since had entered it. Whoever comes to it later must fail as
// decided, and not wait for the rank that revoked instead of entering.
FT_TEST(recorded_failure_outlives_those_who_had_entered_the_operation) {
    const auto spec = world({0, 1, 2}, Policy::Lossy);
    Decision previous;
    previous.attempt = 1;
    previous.alive = RankSet::first(3);
    previous.revoked = true;
    previous.revoked_from = 3;
    OpPlan given_up;
    given_up.seq = 2;
    given_up.verdict = OpPlan::Verdict::Fail;
    given_up.cause.code = Code::Revoked;
    previous.plans.push_back(given_up);
    for (const bool one_is_open : {true, false}) {
        std::map<int, Vote> votes;
        for (int rank : {0, 1}) {
            auto& vote = votes[rank];
            vote.attempt = 2;
            vote.done_seq = one_is_open ? 0 : 1;
            if (one_is_open) {
                OpVote op;
                op.seq = 1;
                op.shape.kind = OpKind::Barrier;
                vote.ops.push_back(op);
            }
        }
        const auto decision = make_decision({spec, previous, votes, RankSet::of({2}), {{2, Evidence::Pidfd}}, 3});
        const auto* plan = decision.plan_for(2);
        REQUIRE(plan != nullptr);
        EXPECT(plan->verdict == OpPlan::Verdict::Fail);
        EXPECT(plan->cause.code == Code::Revoked);
        EXPECT_EQ(decision.revoked_from, std::uint64_t{3});
    }
    // Until all are past it.
    std::map<int, Vote> votes;
    for (int rank : {0, 1}) {
        votes[rank].attempt = 2;
        votes[rank].done_seq = 2;
    }
    EXPECT(make_decision({spec, previous, votes, RankSet::of({2}), {{2, Evidence::Pidfd}}, 3}).plan_for(2) == nullptr);
}

// Rank 0 had returned and was handing its result out when it died; its replacement has it in the log. Rank 1 holds a final already: the
// rest is handed out, too, and not reduced again, which might give other bits (a small all-reduce adds in another order than its repair).
FT_TEST(replay_hands_out_what_the_decision_before_knew_to_be_complete) {
    const auto spec = world({0, 1}, Policy::Replay);
    Decision previous;
    previous.attempt = 4096;
    previous.alive = RankSet::first(2);
    std::map<int, Vote> votes;
    votes[0].logged = 1;
    OpVote op;
    op.seq = 1;
    op.shape.kind = OpKind::AllReduce;
    op.shape.algorithm = Algorithm::Flat;
    op.shape.blocks = 1;
    op.shape.per_block = 2;
    op.labels = {{1, LabelKind::Final, RankSet::first(2)}, {1, LabelKind::Input, {}}};
    votes[1].ops.push_back(op);
    votes[1].known_done = 1;
    const auto decision = make_decision({spec, previous, votes, {}, {}, 3});
    EXPECT_EQ(decision.done_through, std::uint64_t{1});
    const auto* plan = decision.plan_for(1);
    REQUIRE(plan != nullptr && plan->runs.size() == 1);
    EXPECT(plan->verdict == OpPlan::Verdict::Repair && plan->runs[0].mode == SegmentMode::Gather);
    EXPECT_EQ(plan->runs[0].rank, 0);
    EXPECT_EQ(plan->runs[0].count, 2u);
}

// Under raise a final is read over the input, and the read has broken off: the segment is what its owner has, or lost.
FT_TEST(a_lost_input_is_handed_out_or_fails_the_operation) {
    const auto spec = world({0, 1}, Policy::Raise);
    Decision previous;
    previous.alive = RankSet::first(2);
    for (const bool owner_has_it : {true, false}) {
        std::map<int, Vote> votes;
        for (int rank : {0, 1}) {
            OpVote op;
            op.seq = 1;
            op.shape.kind = OpKind::AllReduce;
            op.shape.blocks = 1;
            op.shape.per_block = 2;
            const LabelRun final{1, LabelKind::Final, RankSet::first(2)}, input{1, LabelKind::Input, {}};
            op.labels = {rank == 0 && owner_has_it ? final : input, input};
            if (rank == 1) op.labels[0].kind = LabelKind::Empty;
            votes[rank].attempt = 1;
            votes[rank].ops.push_back(op);
        }
        const auto decision = make_decision({spec, previous, votes, RankSet{}, {}, 1});
        const auto* plan = decision.plan_for(1);
        REQUIRE(plan != nullptr);
        EXPECT(plan->verdict == (owner_has_it ? OpPlan::Verdict::Repair : OpPlan::Verdict::Fail));
        if (!owner_has_it) continue;
        REQUIRE(plan->runs.size() == 2);
        EXPECT(plan->runs[0].mode == SegmentMode::Gather && plan->runs[0].rank == 0);
        EXPECT(plan->runs[1].mode == SegmentMode::Reduce);
    }
}

// Rank 2 has found the root of its operation 1 dead and has gone on; what the others call there is another. Whatever its vote says of a later
// one, and whoever is through theirs: rank 2 takes no part in handing it out.
FT_TEST(who_failed_at_once_has_not_completed_what_others_call_there) {
    const auto spec = world({0, 1, 2, 3}, Policy::Lossy);
    Decision previous;
    previous.attempt = 1;
    previous.alive = RankSet::first(3);
    for (const bool one_is_through : {false, true}) {
        std::map<int, Vote> votes;
        for (int rank : {0, 1, 2}) {
            OpVote op;
            op.seq = rank == 2 ? 2 : 1;
            op.state = rank == 2                     ? OpVote::State::Failed
                       : rank == 0 && one_is_through ? OpVote::State::Complete
                                                     : OpVote::State::Open;
            op.shape.kind = OpKind::Barrier;
            votes[rank].attempt = 2;
            votes[rank].done_seq = op.state == OpVote::State::Open ? op.seq - 1 : op.seq;
            votes[rank].ops.push_back(op);
        }
        votes[2].unrun.add(1);
        const auto decision = make_decision({spec, previous, votes, RankSet::of({3}), {{3, Evidence::Pidfd}}, 3});
        const auto* plan = decision.plan_for(1);
        REQUIRE(plan != nullptr);
        EXPECT(plan->verdict == OpPlan::Verdict::Fail && plan->cause.code == Code::Mismatch);
        EXPECT(plan->cause.ranks == std::vector<std::int32_t>({2}));
    }
}

}  // namespace ftcomm::unit
