// Token-passing ring. Every segment has a plan: reduced towards its owner and then handed round (all-reduce), handed round from
// a holder (broadcast, all-gather, repairs), or reduced only (reduce, reduce-scatter). One engine for healthy and repair runs.
// Ring all-reduce: Patarasuk and Yuan 2009. Each rank has exactly one event to wait for per segment.
#include <algorithm>
#include <deque>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/logged_share.h"
#include "collectives/run.h"

namespace ftcomm {

namespace {

// Own segments under way at a time. Through memory few, so that what one rank writes is still in the caches when the next one reads it; over
// a network as many as fill a long line: 4 MB each way.
constexpr int kNear = 8, kNearSums = 2, kFar = 64;

class RingRun final : public Run {
public:
    RingRun(RunEnv env, OpState& op, std::vector<SegmentRun> plan, bool fence)
        : env_(std::move(env)),
          op_(op),
          plan_(std::move(plan)),
          want_fence_(fence && (kFaultTolerant || op.shape.kind == OpKind::Barrier)),
          share_(env_, op_),
          fence_(env_, op_),
          window_(window_of(env_, op)) {}

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
        share_.begin(plan_);
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
            case FrameKind::Shared: on_shared(h.segment, payload); break;
            case FrameKind::ShareAsk: hand_out(from, h.segment); return;
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

    bool done() const override {
        if (remaining_ > 0 || (want_fence_ && !fence_.done())) return false;
        return kFaultTolerant ||
               env_.sender.clear(env_.slot_of(env_.successor()));  // what waits there lies in the caller's buffer
    }
    bool all_have_come() const override { return want_fence_ && fence_.done(); }
    const char* phase() const override {
        return !gate_ ? "its successor to enter" : remaining_ > 0 ? "data" : "the completion fence";
    }

private:
    const SegmentRun& plan_of(std::uint32_t s) const { return plan_[mode_[s]]; }
    const SegmentRun& checked(std::uint32_t s, ByteView payload) const {
        FT_CHECK(s < mode_.size() && payload.size() == op_.segment_bytes(s), "segment %u with %zu bytes", s, payload.size());
        return plan_of(s);
    }

    static int window_of(const RunEnv& env, const OpState& op) {
        for (int r : env.living)
            if (r != env.rank && !env.memory->is_near(env.slot_of(r))) return kFar;
        return op.shape.runs_as() == OpKind::AllReduce ? kNearSums : kNear;
    }

    void inject() {
        while (gate_ && next_mine_ < mine_.size() && in_flight_ < window_) {
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
                    forward(to, h, op_.segment_bytes(s), [&](std::byte* out, bool) {
                        scale(op_.desc.dtype, out, op_.input(s), op_.grid.count(s), op_.desc.factor);
                    });
                } else {
                    env_.sender.send_stable(to, h, ByteView(op_.input(s), op_.segment_bytes(s)));
                }
            }
        }
    }

    // Builds a payload in the next link's own memory where there is room, else in scratch: a partial sum never touches the
    // caller's buffer (invariant B), and a full link never stops us from consuming (no cycle of full links).
    template <class Fill>
    void forward(int slot, FrameHeader h, std::uint32_t bytes, Fill fill) {
        h.length = bytes;
        if (auto* p = env_.sender.reserve(slot, bytes)) {
            // Where ranks share processors the next one may run on this one, and finds it in the caches.
            fill(p, env_.own_processor && env_.sender.streams(slot, bytes));
            env_.sender.commit(slot, h);
            return;
        }
        Bytes scratch = env_.sender.scratch(bytes);
        fill(scratch.data(), false);
        env_.sender.queue(slot, h, std::move(scratch));
    }

    // `n` elements of the segment, from element `at` on.
    void combine_part(std::uint32_t s, std::uint64_t at, std::uint64_t n, std::byte* out, ByteView partial,
                      std::uint32_t divisor = 1) const {
        const auto& d = op_.desc;
        const auto* from = partial.data() + at * size_of(d.dtype);
        const auto* own = op_.input(s) + at * size_of(d.dtype);
        if (d.op == ReduceOp::PremulSum) {
            scale(d.dtype, out, own, n, d.factor);
            own = out;
        }
        reduce(d.dtype, d.op, out, from, own, n, divisor);
    }

    void combine(std::uint32_t s, std::byte* out, ByteView partial, std::uint32_t divisor = 1) const {
        combine_part(s, 0, op_.grid.count(s), out, partial, divisor);
    }

    // Past the caches, by way of a block that stays in the nearest one.
    void combine_into_link(std::uint32_t s, std::byte* out, ByteView partial) const {
        alignas(64) std::byte block[8192];
        const auto size = size_of(op_.desc.dtype);
        const auto count = op_.grid.count(s), most = sizeof block / size;
        for (std::uint64_t at = 0; at < count; at += most) {
            const auto n = std::min<std::uint64_t>(most, count - at);
            combine_part(s, at, n, block, partial);
            copy_past_cache(out + at * size, block, n * size);
        }
    }

    void on_partial(std::uint32_t s, ByteView payload) {
        const auto& r = checked(s, payload);
        FT_CHECK(r.mode == SegmentMode::Reduce, "a partial sum for segment %u, which is not reduced", s);
        const int next = env_.slot_of(env_.successor());
        if (r.rank != env_.rank) {
            auto h = env_.header(FrameKind::ReduceScatter, op_);
            h.segment = s;
            forward(next, h, op_.segment_bytes(s), [&](std::byte* out, bool streams) {
                if (streams) combine_into_link(s, out, payload);
                else combine(s, out, payload);
            });
            FT_POINT("ring.rs.hop");
            FT_POINT("collective.part");
            if (!op_.shape.shares_finals()) --remaining_;
            return;
        }
        // The owner: whole and final in one step, the divisor included.
        auto* out = op_.result(s);
        combine(s, out, payload, op_.desc.op == ReduceOp::Avg ? static_cast<std::uint32_t>(r.contributors.count()) : 1);
        op_.set_final(s, r.contributors);
        FT_POINT("ring.rs.owner");
        --remaining_;
        if (share(s)) return;
        auto h = env_.header(op_.shape.shares_finals() ? FrameKind::Gather : FrameKind::Token, op_);
        h.segment = s;
        if (op_.shape.shares_finals()) {
            env_.sender.send_stable(next, h, ByteView(out, op_.segment_bytes(s)));
        } else {
            env_.sender.send(next, h);
        }
    }

    // The final is copied once, into the log, and each of the others copies it from there: around the ring it would be copied into
    // every link and out of it.
    bool share(std::uint32_t s) {
        if (!share_.put(s, 1)) return false;
        auto h = env_.header(FrameKind::Shared, op_);
        h.segment = s;
        for (int i = 1; i < env_.size(); ++i) env_.sender.send(env_.slot_of(env_.rank_at(env_.position + i)), h);
        return true;
    }

    // This rank cannot be done before the other has it: its buffer is still the operation's.
    void hand_out(int rank, std::uint32_t s) {
        FT_CHECK(s < mode_.size() && plan_of(s).rank == env_.rank && op_.label(s) == LabelKind::Final,
                 "rank %d asks for segment %u", rank, s);
        auto h = env_.header(FrameKind::Shared, op_);
        h.segment = s;
        env_.sender.send_stable(env_.slot_of(rank), h, ByteView(op_.result(s), op_.segment_bytes(s)));
    }

    void on_shared(std::uint32_t s, ByteView payload) {
        FT_CHECK(s < mode_.size() && plan_of(s).mode == SegmentMode::Reduce && env_.log != nullptr,
                 "segment %u is said to be in a log", s);
        const auto& r = plan_of(s);
        if (op_.label(s) != LabelKind::Final && !payload.empty()) {
            FT_CHECK(payload.size() == op_.segment_bytes(s), "segment %u with %zu bytes", s, payload.size());
            copy_bytes(op_.result(s), payload.data(), payload.size());
        } else if (op_.label(s) != LabelKind::Final) {
            if (!share_.find(r.rank, s, 1)) {
                // Its owner is gone, and that will be told; or this process cannot map the owner's log.
                auto h = env_.header(FrameKind::ShareAsk, op_);
                h.segment = s;
                env_.sender.send(env_.slot_of(r.rank), h);
                return;
            }
            const bool stood = share_.take(s);
            FT_CHECK(stood, "segment %u was overwritten in its owner's log while it was read", s);
        }
        op_.set_final(s, r.contributors);
        have_final(r);
    }

    void on_final(std::uint32_t s, ByteView payload) {
        const auto& r = checked(s, payload);
        FT_CHECK(r.mode == SegmentMode::Reduce || r.mode == SegmentMode::Gather, "a final for segment %u, which does not move",
                 s);
        auto* out = op_.result(s);
        if (op_.label(s) != LabelKind::Final) copy_bytes(out, payload.data(), payload.size());
        op_.set_final(s, r.contributors);
        FT_POINT("ring.ag.hop");
        FT_POINT("collective.part");
        auto h = env_.header(FrameKind::Gather, op_);
        h.segment = s;
        const int next = env_.slot_of(env_.successor());
        if (env_.successor() != r.rank) {
            env_.sender.send_stable(next, h, ByteView(out, payload.size()));
        } else if (r.mode == SegmentMode::Gather) {
            h.kind = FrameKind::Token;
            env_.sender.send(next, h);
        }
        have_final(r);
    }

    // Its owner's successor began this sum, and now knows that it has been all the way round. (Of a gather a token says so.)
    void have_final(const SegmentRun& r) {
        --remaining_;
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
    LoggedShare share_;
    Fence fence_;
    const int window_;
};

}  // namespace

std::unique_ptr<Run> make_ring_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, bool fence) {
    return std::make_unique<RingRun>(std::move(env), op, std::move(plan), fence);
}

}  // namespace ftcomm
