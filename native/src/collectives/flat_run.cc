// Small all-reduces and all-gathers (and what runs as one), broadcasts and barriers: everyone sends what it has to everyone, the others of a
// broadcast and all of a barrier that they are there, and is done when it has heard all: one message time. A sum is made in rank order. No fence: the result is
// kept until the next operation shows that all have it (C6).
//
// On one host they do not send it but show it (Posts), once all know where. To find each other's they tell each other of their boards with what they
// send, in the first operation since they last agreed who takes part. Who puts something in where all others have done so already is the
// last one, and nudges those who sleep.
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
        mine_ = own_input();
        introduces_ = env_.posts != nullptr && !env_.board->all_known();
        if (introduces_) all_told_ = env_.board->open(*env_.memory);
        // L5: nothing goes by what waits for room.
        shows_ = looks() && env_.shows && mine_.size() <= env_.post_limit && env_.sender.idle();
        if (shows_) {
            env_.posts->put(key(), mine_);
            FT_POINT("flat.post");
        } else {
            for (int i = 1; i < env_.size(); ++i) {
                send(i);
                FT_POINT("flat.send");
            }
        }
        note(env_.position);
        finish_when_complete();
        look();
        nudge_when_done();
    }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        if (h.kind != FrameKind::Flat) return;
        const int at = env_.position_of(from);
        if (introduces_) learn(from, h.aux2);
        take_input(at, from, payload);
        nudge_when_done();
    }

    void look() override {
        for (int i = 1; i < env_.size() && looks(); ++i) {
            const int at = (env_.position + i) % env_.size(), rank = env_.rank_at(at);
            if (have_.has(at)) continue;
            ByteView input;
            const auto found = env_.posts->look(rank, key(), *env_.scratch, &input);
            mismatch |= found == Posts::Found::Other;
            if (found == Posts::Found::Input) take_input(at, rank, input);
        }
    }

    void add_words(std::vector<Transport::Word>& words) const override {
        if (!looks()) return;
        for (int at = 0; at < env_.size(); ++at)
            if (!have_.has(at)) words.push_back(env_.posts->word(env_.rank_at(at), op_.seq));
    }

    // Who has called something else does not look there, and hears nothing of this one but by a message.
    void on_tick() override {
        look();
        if (done_ || !shows_ || ++ticks_ != kPatience) return;
        for (int i = 1; i < env_.size(); ++i)
            if (!have_.has((env_.position + i) % env_.size())) send(i);
    }

    bool done() const override { return done_; }
    const FlatRoom* kept() const override { return done_ ? env_.flat : nullptr; }
    bool is_reusable() const override { return done_; }
    const char* phase() const override { return "the others' inputs"; }

private:
    Posts::Key key() const { return {env_.comm, op_.seq, op_.signature, env_.attempt}; }
    bool looks() const { return env_.posts != nullptr && !introduces_ && !done_ && !mismatch; }
    void send(int to) {
        auto h = env_.header(FrameKind::Flat, op_);
        if (introduces_ && all_told_) h.aux2 = env_.board->place();
        env_.sender.send(env_.slot_of(env_.rank_at(env_.position + to)), h, mine_);
    }
    // C8: all are told the same, and either all know all, or none does, when it is done. (One that is out of sight has left this attempt.)
    void learn(int rank, std::uint64_t place) {
        if (place == 0) all_told_ = false;
        else over_ |= !env_.board->learn(*env_.memory, rank, env_.slot_of(rank), place);
    }
    // One that has seen the others' was the last to put something in, or came to it after all that were shown.
    void nudge_when_done() {
        for (int i = 1; i < env_.size() && done_ && shows_; ++i)
            env_.memory->nudge(env_.slot_of(env_.rank_at(env_.position + i)));
    }
    void take_input(int at, int from, ByteView payload) {
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
        if (done_ || over_ || count_ != env_.size()) return;
        if (introduces_) {
            if (all_told_) env_.board->set_all_known();
            else env_.board->set_lacks_one();
        }
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
    ByteView mine_;  // what the others get
    std::size_t bytes_ = 0;  // of a sum, or of a rank's block
    RankSet have_;  // positions
    int count_ = 0;  // of them
    int waiting_ = 0;  // inputs that lie behind the result
    bool introduces_ = false;  // the boards are made known
    bool all_told_ = false;  // there is one of everybody so far
    bool shows_ = false;  // this rank's input
    int ticks_ = 0;
    bool over_ = false, done_ = false;
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
