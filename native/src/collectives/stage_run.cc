// An all-reduce by windows: every rank puts its input into its own, every owner reduces its piece of the chunk out of all of them into its own, and
// everyone copies the finals out of those. An input is read from memory once, a result written there once.
//
// A chunk is a piece of every share, so that the owners are those of the plan. Step t: reduce chunk t - 1, copy the finals of chunk t - 2,
// stage chunk t. A copy whose ticket does not stand has cost the input; that still is in this rank's own window (invariant B).
#include <cstring>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/window_run.h"

namespace ftcomm {

namespace {

class StageRun final : public WindowRun {
public:
    using WindowRun::WindowRun;

private:
    enum Task { kReduce, kGive, kStage, kTasks };

    int tasks() const override { return kTasks; }
    std::uint32_t last_step() const override { return chunks_ + 1; }
    std::uint64_t places() const override { return 2 * (env_.living.size() + 1); }
    std::uint64_t input_at(std::uint32_t chunk, int position) const {
        return place(2 + chunk % 2 * env_.living.size() + static_cast<std::size_t>(position));
    }
    std::uint64_t result_at(std::uint32_t chunk) const { return place(chunk % 2); }

    bool is_due(int task, int position) override {
        const bool own = position == env_.position;
        switch (task) {
            case kReduce: return own && step_ >= 1 && step_ <= chunks_ && piece(step_ - 1, position).segments > 0;
            case kGive: return step_ >= 2 && piece(step_ - 2, position).segments > 0;
            // What this rank owns it reduces from where it is.
            default: return !own && step_ < chunks_ && piece(step_, position).segments > 0;
        }
    }
    void do_piece(int task, int position) override {
        if (task == kReduce) reduce_own();
        else if (task == kGive) give(position);
        else stage(position);
    }

    void stage(int position) {
        const auto p = piece(step_, position);
        env_.shared->copy(own_window() + input_at(step_, position), op_.input(p.segment), bytes(p));
        FT_POINT("stage.input");
    }

    // In the order of the ranks, whoever owns the segments.
    void reduce_own() {
        const auto chunk = step_ - 1;
        const auto p = piece(chunk, env_.position);
        inputs_.clear();
        for (int i = 0; i < env_.size(); ++i)
            inputs_.push_back(i == env_.position ? op_.input(p.segment) : window(i) + input_at(chunk, env_.position));
        const auto divisor = op_.desc.op == ReduceOp::Avg ? static_cast<std::uint32_t>(env_.size()) : 1;
        const bool past = env_.shared->way() == Into::Memory;
        if (past && env_.scratch->size() < bytes(p)) env_.scratch->resize(bytes(p));
        auto* to = own_window() + result_at(chunk);
        auto* sum = past ? env_.scratch->data() : to;
        combine(op_.desc.dtype, op_.desc.op, sum, inputs_, op_.grid.count(p.segment, p.segments), divisor);
        if (past) copy_past_cache(to, sum, bytes(p));
        for (int i = 0; i < env_.size(); ++i)
            if (!stands(i)) give_up();  // then it is nobody's
        FT_POINT("stage.reduce");
        FT_POINT("collective.part");
    }

    void give(int position) {
        const auto chunk = step_ - 2;
        const auto p = piece(chunk, position);
        auto* to = op_.result(p.segment);
        copy(to, window(position) + result_at(chunk), bytes(p), into_results());
        if (!stands(position)) {
            give_up();
            std::memcpy(to, own_window() + input_at(chunk, position), bytes(p));
            return;
        }
        for (std::uint32_t s = p.segment; s < p.segment + p.segments; ++s) op_.set_final(s, plan_.front().contributors);
        FT_POINT("stage.final");
        FT_POINT("collective.part");
    }

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

std::unique_ptr<Run> make_stage_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket) {
    return std::make_unique<StageRun>(std::move(env), op, std::move(plan), ticket);
}

}  // namespace ftcomm
