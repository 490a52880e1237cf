// Small all-reduces and all-gathers (and what runs as one), broadcasts and barriers: everyone sends what it has to everyone, the others of a
// broadcast and all of a barrier that they are there, and is done when it has heard all: one message time. A sum is made in rank order. No fence: the result is
// kept until the next operation shows that all have it (C6).
#include <memory>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/flat_result.h"
#include "collectives/run.h"

namespace ftcomm {

namespace {

class FlatRun final : public Run {
public:
    FlatRun(RunEnv env, OpState& op)
        : env_(std::move(env)),
          op_(op),
          sums_(op.shape.runs_as() == OpKind::AllReduce),
          gathers_(op.shape.runs_as() == OpKind::AllGather) {
        bytes_ = static_cast<std::size_t>(op_.desc.count * size_of(op_.desc.dtype));
        const auto ranks = static_cast<std::size_t>(env_.size());
        auto& flat = *env_.flat;
        const auto size =
            op_.shape.kind == OpKind::Broadcast ? bytes_ : bytes_ * ranks;  // of a sum: the result, and all inputs but one
        if (flat.room.size() < size) flat.room.resize(size);
        flat.parts.resize(sums_ ? ranks : 0);
    }

    ~FlatRun() override {
        if (!done_) env_.flat->trim();
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
        if (!sums_) {
            if (!payload.empty()) take(from, payload);
        } else if (count_ + 1 == env_.size()) {  // the last one, added up before this returns
            env_.flat->parts[static_cast<std::size_t>(at)] = payload.data();
        } else {
            keep_part(at, payload.data());
        }
        note(at);
        FT_POINT("flat.receive");
        finish_when_complete();
    }

    bool done() const override { return done_; }
    const FlatRoom* kept() const override { return done_ ? env_.flat : nullptr; }
    bool is_reusable() const override { return done_; }
    const char* phase() const override { return "the others' inputs"; }

private:
    std::byte* result(std::uint32_t block = 0) { return env_.flat->room.data() + block * bytes_; }
    std::byte* next_room() {
        ++waiting_;
        FT_CHECK(waiting_ < env_.size(), "%d inputs wait for others", waiting_);
        return result(static_cast<std::uint32_t>(waiting_));
    }
    void keep_part(int position, const void* input) {
        auto* to = next_room();
        copy_bytes(to, input, bytes_);
        env_.flat->parts[static_cast<std::size_t>(position)] = to;
    }

    // Of two ranks each has the other's part of an all-to-all to itself: there is no third one that it might have to hand it to. (What it then
    // hands out as the other's block is dropped there: that rank has it.)
    bool sends_part() const { return gathers_ && op_.is_part() && env_.size() == 2; }
    std::size_t bytes_from(int rank) const {
        if (sends_part()) return bytes_ / 2;
        return op_.shape.kind != OpKind::Broadcast || rank == op_.shape.root ? bytes_ : 0;
    }
    std::size_t part_of(int rank) const { return sends_part() ? static_cast<std::size_t>(rank) * (bytes_ / 2) : 0; }

    // What this rank sends.
    ByteView own_input() {
        const auto bytes = bytes_from(env_.rank);
        if (bytes == 0) return {};
        if (!sums_) {  // all members take part: a rank's position is the rank
            const auto b = block_of(env_.rank);
            const bool part = op_.is_part();
            const std::byte* here = part ? static_cast<const std::byte*>(op_.desc.send) : op_.result(b);
            if (kFaultTolerant || part) copy_bytes(result(b), here, bytes_);
            return {here + part_of(1 - env_.rank), bytes};
        }
        const auto* mine = op_.input();
        if (op_.desc.op == ReduceOp::PremulSum) {
            auto* scaled = next_room();
            scale(op_.desc.dtype, scaled, mine, op_.desc.count, op_.desc.factor);
            mine = scaled;
        } else if (!kFaultTolerant && !op_.is_part() && env_.position >= 2) {
            // The sum goes over it at once, and does not begin with it.
            keep_part(env_.position, mine);
            return {mine, bytes};
        }
        env_.flat->parts[static_cast<std::size_t>(env_.position)] = mine;
        return {mine, bytes};
    }

    void take(int from, ByteView block) {
        const auto b = block_of(from);
        const bool part = op_.is_part();
        if (!part) take_block(op_, b, block.data(), block.size(), from);
        if (kFaultTolerant || part) copy_bytes(result(b) + part_of(env_.rank), block.data(), block.size());
    }

    // Of an all-gather, or the only one of a broadcast: its number, its one segment's, and its part's.
    std::uint32_t block_of(int rank) const { return gathers_ ? static_cast<std::uint32_t>(rank) : 0; }
    void note(int position) {
        have_.add(position);
        ++count_;
    }
    void finish_when_complete() {
        if (done_ || count_ != env_.size()) return;
        if (sums_) add_up();
        else if (op_.is_part()) give_blocks(op_, result());
        done_ = true;
        FT_POINT("flat.done");
    }

    void add_up() {
        const auto n = op_.desc.count;
        FT_POINT("flat.reduce");
        const auto divisor = op_.desc.op == ReduceOp::Avg ? static_cast<std::uint32_t>(op_.team.count()) : 1;
        const bool part = op_.is_part();
        // Into the caller's buffer, and from there, while it is in the first-level cache, to where it is kept; the other way round where that
        // would go over an input that is added later.
        const bool over_input = !part && (!kFaultTolerant || env_.position < 2);
        void* sum = over_input ? op_.desc.recv : result();
        void* also = part || !kFaultTolerant ? nullptr : over_input ? result() : op_.desc.recv;
        combine(op_.desc.dtype, op_.desc.op, sum, env_.flat->parts, n, divisor, also);
        set_summed(op_, sum);
    }

    RunEnv env_;
    OpState& op_;
    const bool sums_, gathers_;
    std::size_t bytes_ = 0;  // of a sum, or of a rank's block
    RankSet have_;  // positions
    int count_ = 0;  // of them
    int waiting_ = 0;  // inputs that lie behind the result
    bool done_ = false;
};

}  // namespace

std::unique_ptr<Run> make_flat_run(RunEnv env, OpState& op, std::unique_ptr<Run> old) {
    if (old == nullptr) return std::make_unique<FlatRun>(std::move(env), op);
    auto* again = static_cast<FlatRun*>(old.get());
    FT_CHECK(again->is_reusable(), "a run is to give its memory away, and is not over");
    (void)old.release();
    std::destroy_at(again);
    return std::unique_ptr<Run>(std::construct_at(again, std::move(env), op));
}

}  // namespace ftcomm
