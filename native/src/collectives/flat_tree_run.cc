// What flat_run.cc does, where ranks are many: along a tree, 2(n-1) messages and not n(n-1), none to more than `degree` and its one above. A
// rank sends up what it and those below it have, once all of that is here; the first one has all, and its result comes down. A sum is made in the
// order of ranks, part by part, and once: all have the same bits (8- and 16-bit floats go up as float32, and are rounded once). No fence
// either: what came down left when all had entered, so it is kept until the next operation shows that all have it (C6). Who dies on the way
// takes with it what it has not passed on; whoever has the result hands it out.
#include <memory>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "channel/spread.h"
#include "collectives/flat_result.h"
#include "collectives/run.h"

namespace ftcomm {

namespace {

enum Way : std::uint32_t { kUp, kDown, kWaits };  // FrameHeader::segment

class FlatTreeRun final : public Run {
public:
    FlatTreeRun(RunEnv env, OpState& op, int degree)
        : env_(std::move(env)),
          op_(op),
          sums_(op.shape.runs_as() == OpKind::AllReduce),
          gathers_(op.shape.runs_as() == OpKind::AllGather),
          wide_(sums_ && is_narrow_float(op.desc.dtype)),
          bytes_(static_cast<std::size_t>(op.desc.count * size_of(op.desc.dtype))),
          sum_bytes_(wide_ ? op.desc.count * sizeof(float) : bytes_),
          place_(place_in_tree(env_.size(), env_.position, degree)) {
        auto& flat = *env_.flat;
        const auto size = sums_ ? start_of_sum(place_.below.size() + 1) : whole();
        if (flat.room.size() < size) flat.room.resize(size);
        flat.parts.resize(sums_ ? place_.below.size() + 1 : 0);
        heard_.resize(place_.below.size());
    }

    ~FlatTreeRun() override {
        if (!done_) env_.flat->trim();
    }

    void start() override {
        put_in_own();
        send_up_when_complete();
    }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        if (h.kind != FrameKind::Flat || h.segment == kWaits) return;
        if (h.segment == kDown) {
            FT_CHECK(place_.parent >= 0 && from == env_.rank_at(place_.parent), "a result from rank %d, which is not above",
                     from);
            check_size(from, payload, whole());
            FT_POINT("flat.receive");
            finish(payload);
            return;
        }
        std::size_t i = 0;
        while (i < place_.below.size() && env_.rank_at(place_.below[i].begin) != from) ++i;
        FT_CHECK(i < place_.below.size(), "an input from rank %d, which is not below", from);
        check_size(from, payload, bytes_of(place_.below[i]));
        if (heard_[i]) return;
        put_in(i, payload);
        heard_[i] = true;
        ++arrived_;
        FT_POINT("flat.receive");
        send_up_when_complete();
    }

    // Who waits for those below has said nothing to anybody. If they called something else, which failed at once (a dead root), they
    // would never hear of it, and nothing would come from them.
    void on_tick() override {
        if (arrived_ == place_.below.size() || ++ticks_ != kPatience) return;
        for (std::size_t i = 0; i < place_.below.size(); ++i)
            if (!heard_[i]) send(place_.below[i].begin, kWaits, {});
    }

    bool done() const override { return done_; }
    const FlatRoom* kept() const override { return done_ ? env_.flat : nullptr; }
    const char* phase() const override { return arrived_ < place_.below.size() ? "the inputs below" : "the result"; }

private:
    static void check_size(int from, ByteView payload, std::size_t expected) {
        FT_CHECK(payload.size() == expected, "%zu bytes from rank %d, expected %zu", payload.size(), from, expected);
    }
    std::byte* room(std::size_t block = 0) { return env_.flat->room.data() + block * bytes_; }
    // Behind the result of a sum: what this rank puts in, where that is not its input as it is, and what comes from below.
    std::size_t start_of_sum(std::size_t i) const {
        const auto rounded = [](std::size_t n) { return (n + 15) & ~std::size_t{15}; };
        return rounded(bytes_) + i * rounded(sum_bytes_);
    }
    std::byte* sum(std::size_t i) { return env_.flat->room.data() + start_of_sum(i); }
    float* wide_sum() { return reinterpret_cast<float*>(sum(0)); }
    std::size_t whole() const { return gathers_ ? bytes_ * static_cast<std::size_t>(env_.size()) : bytes_; }
    // All members take part in what is no sum: a rank's position is the rank.
    bool has_root(const TreePart& part) const { return part.begin <= op_.shape.root && op_.shape.root < part.end; }
    // What comes from a part: of a sum its sum, of a gather its blocks, of a broadcast the root's data, or that all are there.
    std::size_t bytes_of(const TreePart& part) const {
        if (gathers_) return bytes_ * static_cast<std::size_t>(part.end - part.begin);
        return sums_ ? sum_bytes_ : has_root(part) ? bytes_ : 0;
    }
    std::size_t place_of(const TreePart& part) const { return gathers_ ? static_cast<std::size_t>(part.begin) : 0; }

    void put_in_own() {
        const TreePart own{env_.position, env_.position + 1};
        if (!sums_) {
            const auto bytes = bytes_of(own);
            const auto block = gathers_ ? static_cast<std::uint32_t>(env_.rank) : 0;
            if (bytes > 0) copy_bytes(room(place_of(own)), op_.is_part() ? op_.desc.send : op_.result(block), bytes);
            return;
        }
        const auto* mine = op_.input();
        const auto n = op_.desc.count;
        if (wide_) {
            widen(op_.desc.dtype, wide_sum(), mine, n);
            mine = sum(0);
        }
        if (op_.desc.op == ReduceOp::PremulSum) {
            scale(type_of_sums(), sum(0), mine, n, op_.desc.factor);
            mine = sum(0);
        }
        env_.flat->parts[0] = mine;
    }

    void put_in(std::size_t i, ByteView payload) {
        auto* to = sums_ ? sum(i + 1) : room(place_of(place_.below[i]));
        copy_bytes(to, payload.data(), payload.size());
        if (sums_) env_.flat->parts[i + 1] = to;
        else if (gathers_)
            for (int r = place_.below[i].begin; r < place_.below[i].end; ++r) take(static_cast<std::uint32_t>(r));
        else if (!payload.empty()) take(0);
    }

    DType type_of_sums() const { return wide_ ? DType::Float32 : op_.desc.dtype; }

    void send_up_when_complete() {
        if (arrived_ < place_.below.size()) return;
        const bool first = place_.parent < 0;
        if (sums_) {
            FT_POINT("flat.reduce");
            const bool divides = first && op_.desc.op == ReduceOp::Avg;
            const auto n = op_.desc.count;
            combine(type_of_sums(), op_.desc.op, wide_ ? sum(0) : room(), env_.flat->parts, n,
                    divides ? static_cast<std::uint32_t>(op_.team.count()) : 1);
            if (wide_ && first) narrow(op_.desc.dtype, room(), wide_sum(), n);
        }
        if (first) {
            finish({room(), whole()});
            return;
        }
        send(place_.parent, kUp, {wide_ ? sum(0) : room(place_of(place_.own)), bytes_of(place_.own)});
    }

    void send(int position, Way way, ByteView payload) {
        auto h = env_.header(FrameKind::Flat, op_);
        h.segment = way;
        env_.sender.send(env_.slot_of(env_.rank_at(position)), h, payload);
        FT_POINT("flat.send");
    }

    void finish(ByteView result) {
        for (const auto& part : place_.below) send(part.begin, kDown, result);  // first: they wait for it
        if (result.data() != room()) copy_bytes(room(), result.data(), result.size());
        if (sums_) {
            give_sum(op_, room(), bytes_);
        } else if (op_.is_part()) {
            give_blocks(op_, room());
        } else {
            for (std::uint32_t b = 0; b < (gathers_ ? op_.grid.blocks : 1); ++b) take(b);
        }
        done_ = true;
        FT_POINT("flat.done");
    }

    void take(std::uint32_t block) {
        if (bytes_ > 0 && !op_.is_part())
            take_block(op_, block, room(block), bytes_, gathers_ ? static_cast<int>(block) : op_.shape.root);
    }

    RunEnv env_;
    OpState& op_;
    const bool sums_, gathers_, wide_;
    const std::size_t bytes_, sum_bytes_;  // of a block, of a sum on its way up
    const TreePlace place_;
    std::vector<bool> heard_;  // of the parts below
    std::size_t arrived_ = 0;
    int ticks_ = 0;
    bool done_ = false;
};

}  // namespace

std::unique_ptr<Run> make_flat_tree_run(RunEnv env, OpState& op, int degree) {
    return std::make_unique<FlatTreeRun>(std::move(env), op, degree);
}

}  // namespace ftcomm
