// Token-passing ring. Every segment has a plan: reduced towards its owner and then handed round (all-reduce), handed round from
// a holder (broadcast, all-gather, repairs), or reduced only (reduce, reduce-scatter). One engine for healthy and repair runs.
// Ring all-reduce: Patarasuk and Yuan 2009. Each rank has exactly one event to wait for per segment.
#include <cstring>
#include <deque>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/run.h"

namespace ftcomm {

namespace {

constexpr int kWindow = 8;  // own segments under way at a time

class RingRun final : public Run {
public:
    RingRun(RunEnv env, OpState& op, std::vector<SegmentRun> plan, bool fence)
        : env_(std::move(env)), op_(op), plan_(std::move(plan)), want_fence_(fence), fence_(env_, op_) {}

    void start() override {
        std::uint32_t s = 0;
        mode_.reserve(op_.grid.segments());
        for (std::size_t i = 0; i < plan_.size(); ++i) {
            const auto& r = plan_[i];
            const bool moves = r.mode == SegmentMode::Reduce || r.mode == SegmentMode::Gather;
            const int at = moves ? env_.position_of(r.rank) : -1;
            FT_CHECK(!moves || at >= 0, "the plan names rank %d, which is not alive", r.rank);
            for (std::uint32_t k = 0; k < r.count; ++k, ++s) {
                mode_.push_back(static_cast<std::uint32_t>(i));
                if (r.mode == SegmentMode::Absent) op_.set_absent(s);
                if (!moves) continue;
                ++remaining_;
                const int injector = r.mode == SegmentMode::Reduce ? (at + 1) % env_.size() : at;
                if (injector == env_.position) mine_.push_back(s);
            }
        }
        FT_CHECK(s == op_.grid.segments(), "plan covers %u of %u segments", s, op_.grid.segments());
        FT_POINT("ring.enter");
        env_.sender.send(env_.slot_of(env_.predecessor()), env_.header(FrameKind::Enter, op_));
        inject();
        check_data();
    }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        switch (h.kind) {
            case FrameKind::Enter:
                if (from != env_.successor()) return;
                gate_ = true;
                inject();
                return;
            case FrameKind::Fence: fence_.on_frame(h); return;
            case FrameKind::ReduceScatter: on_partial(h.segment, payload); break;
            case FrameKind::Gather: on_final(h.segment, payload); break;
            case FrameKind::Token:
                // The last rank of the segment's way has it: our injection is complete.
                FT_CHECK(h.segment < op_.grid.segments(), "token for segment %u", h.segment);
                credit();
                --remaining_;
                break;
            case FrameKind::PullEnter:
            case FrameKind::GroupEnter: mismatch = true; return;  // it was called with another algorithm there
            default: return;
        }
        check_data();
    }

    bool done() const override { return remaining_ == 0 && (!want_fence_ || fence_.done()); }
    const char* phase() const override {
        return !gate_ ? "its successor to enter" : remaining_ > 0 ? "data" : "the completion fence";
    }

private:
    const SegmentRun& plan_of(std::uint32_t s) const { return plan_[mode_[s]]; }
    const SegmentRun& checked(std::uint32_t s, ByteView payload) const {
        FT_CHECK(s < mode_.size() && payload.size() == op_.segment_bytes(s), "segment %u with %zu bytes", s, payload.size());
        return plan_of(s);
    }

    void inject() {
        while (gate_ && next_mine_ < mine_.size() && in_flight_ < kWindow) {
            const auto s = mine_[next_mine_++];
            ++in_flight_;
            const auto& r = plan_of(s);
            const int to = env_.slot_of(env_.successor());
            auto h = env_.header(r.mode == SegmentMode::Reduce ? FrameKind::ReduceScatter : FrameKind::Gather, op_);
            h.segment = s;
            if (r.mode == SegmentMode::Gather) {
                FT_CHECK(op_.label(s) == LabelKind::Final, "asked to hand out segment %u without having it", s);
                FT_POINT("ring.ag.first");
                env_.sender.send_stable(to, h, ByteView(op_.result(s), op_.segment_bytes(s)));
            } else {
                FT_POINT("ring.rs.first");
                if (op_.desc.op == ReduceOp::PremulSum) {
                    forward(to, h, op_.segment_bytes(s), [&](std::byte* out) { own_scaled(s, out); });
                } else {
                    env_.sender.send_stable(to, h, ByteView(op_.input(s), op_.segment_bytes(s)));
                }
            }
        }
    }

    void own_scaled(std::uint32_t s, std::byte* out) const {
        scale(op_.desc.dtype, out, op_.input(s), op_.grid.count(s), op_.desc.factor);
    }

    // Builds a payload in the next link's own memory where there is room, else in scratch: a partial sum never touches the
    // caller's buffer (invariant B), and a full link never stops us from consuming (no cycle of full links).
    template <class Fill>
    void forward(int slot, FrameHeader h, std::uint32_t bytes, Fill fill) {
        h.length = bytes;
        if (auto* p = env_.sender.reserve(slot, bytes)) {
            fill(p);
            env_.sender.commit(slot, h);
            return;
        }
        Bytes scratch = env_.sender.scratch(bytes);
        fill(scratch.data());
        env_.sender.queue(slot, h, std::move(scratch));
    }

    void combine(std::uint32_t s, std::byte* out, ByteView partial) const {
        const auto n = op_.grid.count(s);
        if (op_.desc.op == ReduceOp::PremulSum) {
            own_scaled(s, out);
            reduce(op_.desc.dtype, op_.desc.op, out, partial.data(), out, n);
        } else {
            reduce(op_.desc.dtype, op_.desc.op, out, partial.data(), op_.input(s), n);
        }
    }

    void on_partial(std::uint32_t s, ByteView payload) {
        const auto& r = checked(s, payload);
        FT_CHECK(r.mode == SegmentMode::Reduce, "a partial sum for segment %u, which is not reduced", s);
        const int next = env_.slot_of(env_.successor());
        if (r.rank != env_.rank) {
            auto h = env_.header(FrameKind::ReduceScatter, op_);
            h.segment = s;
            forward(next, h, op_.segment_bytes(s), [&](std::byte* out) { combine(s, out, payload); });
            FT_POINT("ring.rs.hop");
            if (!op_.shape.shares_finals()) --remaining_;
            return;
        }
        // The owner: whole and final in one step, the divisor included.
        auto* out = op_.result(s);
        combine(s, out, payload);
        if (op_.desc.op == ReduceOp::Avg)
            divide(op_.desc.dtype, out, op_.grid.count(s), static_cast<std::uint32_t>(r.contributors.count()));
        op_.set_final(s, r.contributors);
        FT_POINT("ring.rs.owner");
        --remaining_;
        auto h = env_.header(op_.shape.shares_finals() ? FrameKind::Gather : FrameKind::Token, op_);
        h.segment = s;
        if (op_.shape.shares_finals()) {
            env_.sender.send_stable(next, h, ByteView(out, op_.segment_bytes(s)));
        } else {
            env_.sender.send(next, h);
        }
    }

    void on_final(std::uint32_t s, ByteView payload) {
        const auto& r = checked(s, payload);
        FT_CHECK(r.mode == SegmentMode::Reduce || r.mode == SegmentMode::Gather, "a final for segment %u, which does not move",
                 s);
        auto* out = op_.result(s);
        if (op_.label(s) != LabelKind::Final) std::memcpy(out, payload.data(), payload.size());
        op_.set_final(s, r.contributors);
        FT_POINT("ring.ag.hop");
        --remaining_;
        auto h = env_.header(FrameKind::Gather, op_);
        h.segment = s;
        const int next = env_.slot_of(env_.successor());
        if (env_.successor() != r.rank) {
            env_.sender.send_stable(next, h, ByteView(out, payload.size()));
        } else if (r.mode == SegmentMode::Gather) {
            h.kind = FrameKind::Token;
            env_.sender.send(next, h);
        }
        if (r.mode == SegmentMode::Reduce && env_.predecessor() == r.rank) credit();
        if (remaining_ == 0) FT_POINT("ring.ag.final");
    }

    void credit() {
        --in_flight_;
        inject();
    }

    void check_data() {
        if (remaining_ == 0 && want_fence_ && !fence_.begun()) fence_.begin();
    }

    RunEnv env_;
    OpState& op_;
    std::vector<SegmentRun> plan_;
    std::vector<std::uint32_t> mode_;  // segment -> index into plan_
    std::vector<std::uint32_t> mine_;  // segments that start here
    std::size_t next_mine_ = 0;
    int in_flight_ = 0;
    std::uint32_t remaining_ = 0;      // segments whose event has not come
    bool gate_ = false;                // the successor has entered: its buffer is its input now
    bool want_fence_;
    Fence fence_;
};

}  // namespace

std::unique_ptr<Run> make_ring_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, bool fence) {
    return std::make_unique<RingRun>(std::move(env), op, std::move(plan), fence);
}

}  // namespace ftcomm
