// A broadcast or an all-gather by windows: who has a block puts it into its window, and everyone copies it out of there. Step t: copy chunk t - 1,
// put chunk t. All that is copied over is empty: a copy whose ticket does not stand costs nothing (invariant B).
#include <algorithm>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "collectives/window_run.h"

namespace ftcomm {

namespace {

class BlockRun final : public WindowRun {
public:
    BlockRun(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket)
        : WindowRun(std::move(env), op, ticket), plan_(std::move(plan)) {}

private:
    enum Task { kTake, kPut, kTasks };

    Form form() override {
        shares_.lay_out(env_, op_, plan_, plan_.size());
        return {shares_.chunks(), in_lines(shares_.place()), 1, shares_.owners()};
    }

    int tasks() const override { return kTasks; }
    bool is_due(int task, int position) override {
        const bool own = position == env_.position;
        if (task == kTake) return !own && step_ >= 1 && shares_.piece(step_ - 1, position).segments > 0;
        return own && shares_.piece(step_, position).segments > 0;
    }
    void do_piece(int task, int position) override {
        if (task == kTake) take(position);
        else put();
    }

    void put() {
        const auto p = shares_.piece(step_, env_.position);
        env_.shared->copy(own_place(step_, 0), op_.result(p.segment), Shares::bytes(op_, p));
        FT_POINT("stage.input");
    }

    void take(int position) {
        const auto chunk = step_ - 1;
        const auto p = shares_.piece(chunk, position);
        FT_CHECK(op_.label(p.segment) == LabelKind::Empty, "segment %u is copied over what is there", p.segment);
        copy(op_.result(p.segment), place(position, chunk, 0), Shares::bytes(op_, p),
             into_results(op_.grid.blocks * op_.grid.block_elements));
        if (!stands(position)) return give_up();
        Shares::set_final(op_, p, RankSet::only(env_.rank_at(position)));
        FT_POINT("stage.final");
        FT_POINT("collective.part");
    }

    const std::vector<SegmentRun> plan_;
    Shares shares_;
};

}  // namespace

bool is_first_hand(const std::vector<SegmentRun>& plan) {
    int before = -1;
    return std::ranges::all_of(plan, [&](const SegmentRun& r) {
        const bool next = r.mode == SegmentMode::Gather && r.rank > before && r.contributors == RankSet::only(r.rank);
        before = r.rank;
        return next;
    });
}

std::unique_ptr<Run> make_block_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket) {
    return std::make_unique<BlockRun>(std::move(env), op, std::move(plan), ticket);
}

}  // namespace ftcomm
