// An all-reduce, a reduce or a reduce-scatter by windows: every rank puts its input into its own, and every owner reduces its piece of the chunk
// out of all of them: into its own, out of which everyone copies the finals, or to where it belongs. An input is read from memory once, a result
// written there once.
//
// A chunk is a piece of every share, so that the owners are those of the plan. Step t: reduce chunk t - 1, copy the finals of chunk t - 2,
// stage chunk t. A copy whose ticket does not stand has cost the input; that still is in this rank's own window (invariant B).
#include <algorithm>

#include "base/copy.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/logged_share.h"
#include "collectives/window_run.h"

namespace ftcomm {

namespace {

class StageRun final : public WindowRun {
public:
    StageRun(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket, bool in_rank_order)
        : WindowRun(std::move(env), op, ticket),
          plan_(std::move(plan)),
          gives_(op.shape.shares_finals()),
          in_rank_order_(in_rank_order),
          share_(env_, op_) {}

private:
    enum Task { kReduce, kGive, kStage, kTasks };

    Form form() override {
        const auto n = env_.living.size();
        if (op_.shape.kind == OpKind::Reduce) {  // the root's alone, out of the windows of all others
            root_ = env_.position_of(op_.shape.root);
            shares_.lay_out(env_, op_, plan_, n / 2);
            auto others = RankSet::first(env_.size());
            others.remove(root_);
            return {shares_.chunks(), in_lines(shares_.place()), 1, others, root_};
        }
        shares_.lay_out(env_, op_, plan_, n);  // the inputs of all lie in a window, whoever owns them
        share_.begin(plan_);
        return {shares_.chunks() + (gives_ ? 1 : 0), in_lines(shares_.place()), n + 1, RankSet::first(env_.size())};
    }
    static constexpr std::uint64_t kResult = 0;  // the place of it in a set
    std::uint64_t input_of(int position) const { return root_ >= 0 ? 0 : 1 + static_cast<std::uint64_t>(position); }

    int tasks() const override { return kTasks; }
    bool is_due(int task, int position) override {
        const bool own = position == env_.position;
        const auto has = [&](std::uint32_t chunk) { return shares_.piece(chunk, position).segments > 0; };
        switch (task) {
            case kReduce: return own && step_ >= 1 && has(step_ - 1);
            case kGive: return gives_ && step_ >= 2 && has(step_ - 2);
            default: return !own && has(step_);  // what this rank owns it reduces from where it is
        }
    }
    void do_piece(int task, int position) override {
        if (task == kReduce) reduce_own();
        else if (task == kGive) give(position);
        else stage(position);
    }

    void stage(int position) {
        const auto p = shares_.piece(step_, position);
        env_.shared->copy(own_place(step_, input_of(position)), op_.input(p.segment), Shares::bytes(op_, p));
        FT_POINT("stage.input");
    }

    // In the order of the ranks, whoever owns the segments; or in that of a ring, which ends with their owner.
    void reduce_own() {
        const auto chunk = step_ - 1;
        const auto p = shares_.piece(chunk, env_.position);
        inputs_.clear();
        for (int k = 0; k < env_.size(); ++k) {
            const int i = in_rank_order_ ? k : (env_.position + 1 + k) % env_.size();
            inputs_.push_back(i == env_.position ? op_.input(p.segment) : place(i, chunk, input_of(env_.position)));
        }
        const auto divisor = op_.desc.op == ReduceOp::Avg ? static_cast<std::uint32_t>(env_.size()) : 1;
        auto* to = gives_ ? own_place(chunk, kResult) : op_.result(p.segment);
        const bool past = gives_ && env_.shared->way(Shares::bytes(op_, p)) == Into::Memory;
        // Of a reduce-scatter in place: it is still to be added, and needed if this does not count (invariant B).
        const bool over_input = !gives_ && to == op_.input(p.segment);
        if ((past || over_input) && env_.scratch->size() < Shares::bytes(op_, p)) env_.scratch->resize(Shares::bytes(op_, p));
        auto* sum = past || over_input ? env_.scratch->data() : to;
        combine(op_.desc.dtype, op_.desc.op, sum, inputs_, op_.grid.count(p.segment, p.segments), divisor);
        if (past) copy_past_cache(to, sum, Shares::bytes(op_, p));
        bool all_stand = true;
        for (int i = 0; i < env_.size(); ++i) all_stand &= stands(i);
        if (!all_stand) {
            give_up();  // then it is nobody's
        } else if (!gives_) {
            if (over_input) copy_bytes(to, sum, Shares::bytes(op_, p));
            Shares::set_final(op_, p, plan_.front().contributors);
        } else {
            share_.put(p.segment, p.segments,
                       sum);  // while it is in the caches; nobody looks for it there before all of it is final
        }
        FT_POINT("stage.reduce");
        FT_POINT("collective.part");
    }

    void give(int position) {
        const auto chunk = step_ - 2;
        const auto p = shares_.piece(chunk, position);
        auto* to = op_.result(p.segment);
        copy(to, place(position, chunk, kResult), Shares::bytes(op_, p), into_results(op_.grid.block_elements));
        if (!stands(position)) {
            give_up();
            copy_bytes(to, own_place(chunk, input_of(position)), Shares::bytes(op_, p));
            return;
        }
        Shares::set_final(op_, p, plan_.front().contributors);
        FT_POINT("stage.final");
        FT_POINT("collective.part");
    }

    const std::vector<SegmentRun> plan_;
    const bool gives_;
    const bool in_rank_order_;
    int root_ = -1;  // of a reduce: its position
    Shares shares_;
    LoggedShare share_;
    std::vector<const std::byte*> inputs_;
};

}  // namespace

bool is_whole(const std::vector<SegmentRun>& plan, const std::vector<int>& living) {
    int before = -1;
    return std::ranges::all_of(plan, [&](const SegmentRun& r) {
        const bool next = r.mode == SegmentMode::Reduce && r.rank > before && r.contributors == RankSet::of(living);
        before = r.rank;
        return next;
    });
}

std::unique_ptr<Run> make_stage_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket,
                                    bool in_rank_order) {
    return std::make_unique<StageRun>(std::move(env), op, std::move(plan), ticket, in_rank_order);
}

}  // namespace ftcomm
