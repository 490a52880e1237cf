// An all-to-all by windows, of ranks that all live and have as much for each other: every rank puts its parts for the others into its window, and takes
// its own out of theirs. Step t: take chunk t - 1, put chunk t. As of any that goes from rank to rank, inputs stay as they are until all have
// their data, and there are no labels.
#include <algorithm>

#include "base/copy.h"
#include "base/failpoint.h"
#include "collectives/own_part.h"
#include "collectives/window_run.h"

namespace ftcomm {

namespace {

class ExchangeRun final : public WindowRun {
public:
    ExchangeRun(RunEnv env, OpState& op, std::uint64_t ticket)
        : WindowRun(std::move(env), op, ticket),
          part_(op.desc.count * size_of(op.desc.dtype)),
          batch_(std::min(part_, std::max(kLine, env_.stage_bytes / env_.living.size() / kLine * kLine))),
          chunks_(static_cast<std::uint32_t>((part_ + batch_ - 1) / batch_)) {}

private:
    enum Task { kTake, kPut, kTasks };

    Form form() override { return {chunks_, in_lines(batch_), env_.living.size(), RankSet::first(env_.size())}; }
    // Of a part.
    std::uint64_t from(std::uint32_t chunk) const { return chunk * batch_; }
    std::uint64_t bytes(std::uint32_t chunk) const { return std::min(batch_, part_ - from(chunk)); }
    std::uint64_t offset(int position) const { return static_cast<std::uint64_t>(position) * part_; }

    int tasks() const override { return kTasks; }
    bool is_due(int task, int position) override {
        if (task == kTake) return step_ >= 1 && position != env_.position;
        return position == env_.position ? step_ == 0 : step_ < chunks_;
    }
    void do_piece(int task, int position) override {
        if (task == kTake) take(position);
        else put(position);
    }

    void put(int position) {
        const auto* part = static_cast<const std::byte*>(op_.desc.send) + offset(position);
        if (position == env_.position) {  // before anything comes that may lie over it
            OwnPart{part, static_cast<std::byte*>(op_.desc.recv) + offset(position), part_}.copy(part_);
            return;
        }
        env_.shared->copy(own_place(step_, static_cast<std::size_t>(position)), part + from(step_), bytes(step_));
        FT_POINT("stage.input");
    }

    void take(int position) {
        const auto chunk = step_ - 1;
        auto* to = static_cast<std::byte*>(op_.desc.recv) + offset(position) + from(chunk);
        copy(to, place(position, chunk, static_cast<std::size_t>(env_.position)), bytes(chunk),
             into_results(op_.desc.count * env_.living.size()));
        if (!stands(position)) return give_up();
        FT_POINT("stage.final");
        FT_POINT("collective.part");
    }

    const std::uint64_t part_, batch_;  // bytes for each rank, and of a chunk of it
    const std::uint32_t chunks_;
};

}  // namespace

std::unique_ptr<Run> make_exchange_run(RunEnv env, OpState& op, std::uint64_t ticket) {
    return std::make_unique<ExchangeRun>(std::move(env), op, ticket);
}

}  // namespace ftcomm
