// What becomes of one operation after a failure: complete, failed, or repaired, segment by segment. A pure function of the votes.
#pragma once

#include <optional>
#include <vector>

#include "collectives/op_state.h"
#include "collectives/plan.h"

namespace ftcomm {

// One voter's standing in one operation, walked segment by segment.
struct Standing {
    int rank = 0;
    enum class State { NotEntered, Open, Complete, Failed } state = State::NotEntered;
    const OpVote* op = nullptr;
    bool retained = false;
    bool logged = false;  // replay: its log has the result, which counts once it is known that the operation was completed

    LabelRun at(const Shape& shape, std::uint32_t segment) const {
        if (state == State::Open || (state == State::Complete && op != nullptr && !op->labels.empty())) {
            while (segment >= base + op->labels[run].count) {
                base += op->labels[run].count;
                ++run;
            }
            return op->labels[run];
        }
        LabelRun label{1, initial_label(shape, rank, segment / shape.per_block), {}};
        if (label.kind == LabelKind::Final) label.contributors.add(rank);
        return label;
    }

private:
    mutable std::uint32_t base = 0;  // only ever asked for ascending segments
    mutable std::size_t run = 0;
};

class OpPlanner {
public:
    OpPlanner(const PlanInput& in, const RankSet& voters, bool revoke, std::uint64_t known_done)
        : in_(in), voters_(voters), living_(voters.list()), revoke_(revoke), known_done_(known_done) {
        newly_dead_ = in.previous.alive - voters;
    }

    std::uint64_t done_through() const { return done_through_; }  // of what has been planned
    // A living rank's memory cannot be read, though it had seemed to: what was being read comes in frames now, as all that follows.
    bool reads_are_refused() const;
    bool somebody_proposes(Code code) const;
    // nullopt: nobody has entered, nothing to plan. fails_rest: under raise, this and all later operations fail.
    std::optional<OpPlan> plan(std::uint64_t seq, bool* fails_rest);

private:
    // Under replay another way gives other sums than those on record.
    bool frames_may_do() const { return in_.spec.policy != Policy::Replay; }
    static OpPlan fail(OpPlan p, Cause cause);
    bool fails_already(std::uint64_t seq) const;
    // Replay: a process that is no more may have returned it, and nobody knows. It had logged it then; and where there is a fence, so had
    // all. That is as good as its having returned: what is in the log is the result.
    bool may_have_been_returned(const OpPlan& p, const std::vector<Standing>& standings) const;
    // C7: somebody returned. Then everyone has the data (fence), or it can be handed out of what was kept (C6).
    // Nothing: the log of who asks for it settles it.
    std::optional<OpPlan> finish_as_completed(OpPlan p, const std::vector<Standing>& standings);
    std::optional<Cause> disagreement(const std::vector<Standing>& standings);
    // Some ranks call an all-to-all with counts and some without: as all go directly from here on, or null.
    static const Shape* mixed_exchange(const std::vector<Standing>& standings);
    std::optional<Cause> proposed_failure(std::uint64_t seq, const std::vector<Standing>& standings, bool mixed);
    RankSet carried(const LabelRun& label) const;
    std::optional<OpPlan> repair(OpPlan p, const std::vector<Standing>& standings);
    void keep_owners(std::vector<SegmentRun>& runs, std::uint32_t segments) const;
    // What is left to reduce may be the share of one dead rank: all take an equal part of it.
    void spread_reductions(std::vector<SegmentRun>& runs) const;
    bool repair_segment(OpPlan& p, int block, const Standing* holder, const RankSet& set, bool all);
    Cause called_something_else(const RankSet& ranks, const Shape& shape) const;
    // Whoever revokes may never enter what the others wait in (C7: unless somebody has returned from it).
    Cause revoked() const;
    Cause lost_root() const { return peer_failure(in_.dead, in_.evidence, in_.epoch, advice_for(in_.spec.policy)); }
    Cause lost_data() const;

    const PlanInput& in_;
    RankSet voters_, newly_dead_;
    std::uint64_t done_through_ = 0;
    std::vector<int> living_;
    bool revoke_;
    std::uint64_t known_done_;
};

}  // namespace ftcomm
