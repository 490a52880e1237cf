// Small all-reduces, all-gathers, broadcasts and barriers: everyone sends what it has to everyone, the others of a broadcast and all of a
// barrier that they are there, and is done when it has heard all: one message time. A sum is made in rank order. No fence: the inputs are
// kept until the next operation shows that all have the result (C6).
#include <cstring>
#include <memory>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/run.h"

namespace ftcomm {

namespace {

class FlatRun final : public Run {
public:
    FlatRun(RunEnv env, OpState& op) : env_(std::move(env)), op_(op) {
        bytes_ = static_cast<std::size_t>(op_.desc.count * size_of(op_.desc.dtype));
        const auto parts = op_.shape.kind == OpKind::Broadcast ? 1 : static_cast<std::size_t>(env_.size());
        auto& inputs = *env_.inputs;
        if (inputs.room.size() < bytes_ * parts) inputs.room.resize(bytes_ * parts);
        inputs.parts.resize(parts);
        for (std::size_t i = 0; i < parts; ++i) inputs.parts[i] = part(i);
    }

    ~FlatRun() override {
        if (!done_ && env_.inputs->room.size() > FlatInputs::kMuch) env_.inputs->room = Bytes();  // not {}: that keeps the room
    }

    void start() override {
        const auto mine = own_input();
        const auto h = env_.header(FrameKind::Flat, op_);
        for (int i = 1; i < env_.size(); ++i) {
            env_.sender.send(env_.slot_of(env_.rank_at(env_.position + i)), h, mine);
            FT_POINT("flat.send");
        }
        note(env_.position);
        finish_when_complete();
    }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        if (h.kind != FrameKind::Flat) return;
        const int at = env_.position_of(from);
        FT_CHECK(at >= 0 && payload.size() == bytes_from(from), "flat input of %zu bytes from rank %d, expected %zu",
                 payload.size(), from, bytes_from(from));
        if (have_.has(at)) return;
        if (op_.shape.kind != OpKind::AllReduce) {
            if (!payload.empty()) take(from, payload);
        } else if (!kFaultTolerant && count_ + 1 == env_.size()) {
            env_.inputs->parts[static_cast<std::size_t>(at)] = payload.data();
        } else if (bytes_ > 0) {
            std::memcpy(part(static_cast<std::size_t>(at)), payload.data(), bytes_);
        }
        note(at);
        FT_POINT("flat.receive");
        finish_when_complete();
    }

    bool done() const override { return done_; }
    const FlatInputs* inputs() const override { return done_ ? env_.inputs : nullptr; }
    const char* phase() const override { return "the others' inputs"; }

private:
    std::byte* part(std::size_t i) { return env_.inputs->room.data() + i * bytes_; }

    std::size_t bytes_from(int rank) const { return op_.shape.kind != OpKind::Broadcast || rank == op_.shape.root ? bytes_ : 0; }

    // What this rank sends; also where the result is made of it once more.
    ByteView own_input() {
        const auto bytes = bytes_from(env_.rank);
        if (bytes == 0) return {};
        if (op_.shape.kind != OpKind::AllReduce) {  // all members take part: a rank's position is the rank
            const auto b = block_of(env_.rank);
            const ByteView here(op_.result(b), bytes);
            if (!kFaultTolerant) return here;
            std::memcpy(part(b), here.data(), bytes);
            return {part(b), bytes};
        }
        auto* mine = part(static_cast<std::size_t>(env_.position));
        if (!kFaultTolerant && env_.position < 2 && op_.desc.op != ReduceOp::PremulSum) {
            mine = static_cast<std::byte*>(op_.desc.recv);  // the sum begins with it: it may be written over
            env_.inputs->parts[static_cast<std::size_t>(env_.position)] = mine;
        } else if (op_.desc.op == ReduceOp::PremulSum) {
            scale(op_.desc.dtype, mine, op_.desc.recv, op_.desc.count, op_.desc.factor);
        } else {
            std::memcpy(mine, op_.desc.recv, bytes);
        }
        return {mine, bytes};
    }

    // A block is final as it comes, whole, from who has put it in (invariant B).
    void take(int from, ByteView block) {
        const auto b = block_of(from);
        if (op_.label(b) != LabelKind::Final) std::memcpy(op_.result(b), block.data(), block.size());  // else done again
        if (kFaultTolerant) std::memcpy(part(b), block.data(), block.size());
        op_.set_final(b, RankSet::only(from));
    }

    // Of an all-gather, or the only one of a broadcast: its number, its one segment's, and its part's.
    std::uint32_t block_of(int rank) const { return op_.shape.kind == OpKind::AllGather ? static_cast<std::uint32_t>(rank) : 0; }
    void note(int position) {
        have_.add(position);
        ++count_;
    }
    void finish_when_complete() {
        if (done_ || count_ != env_.size()) return;
        if (op_.shape.kind == OpKind::AllReduce) add_up();
        done_ = true;
        FT_POINT("flat.done");
    }

    void add_up() {
        const auto n = op_.desc.count;
        FT_POINT("flat.reduce");
        // All inputs are here, and nothing can fail any more: straight into the caller's buffer (invariant B).
        const auto& contributors = op_.team;
        env_.inputs->divisor = op_.desc.op == ReduceOp::Avg ? static_cast<std::uint32_t>(contributors.count()) : 1;
        combine(op_.desc.dtype, op_.desc.op, op_.desc.recv, env_.inputs->parts, n, env_.inputs->divisor);
        for (std::uint32_t s = 0; s < op_.grid.segments(); ++s) op_.set_final(s, contributors);
    }

    RunEnv env_;
    OpState& op_;
    std::size_t bytes_ = 0;
    RankSet have_;  // positions
    int count_ = 0;  // of them
    bool done_ = false;
};

}  // namespace

void flat_result(const OpDesc& desc, const FlatInputs& inputs, std::byte* to) {
    if (desc.kind == OpKind::AllReduce) {
        combine(desc.dtype, desc.op, to, inputs.parts, desc.count, inputs.divisor);
        return;
    }
    const auto bytes = static_cast<std::size_t>(desc.count * size_of(desc.dtype));
    if (bytes == 0) return;
    for (std::size_t i = 0; i < inputs.parts.size(); ++i) std::memcpy(to + i * bytes, inputs.parts[i], bytes);
}

std::unique_ptr<Run> make_flat_run(RunEnv env, OpState& op, std::unique_ptr<Run> old) {
    if (old == nullptr) return std::make_unique<FlatRun>(std::move(env), op);
    auto* again = static_cast<FlatRun*>(old.get());
    FT_CHECK(again->done(), "a run is to give its memory away, and is not over");
    (void)old.release();
    std::destroy_at(again);
    return std::unique_ptr<Run>(std::construct_at(again, std::move(env), op));
}

}  // namespace ftcomm
