// Ranks that share the processors of one host: every rank puts its input into a window of shared memory, a chunk at a time, every owner
// reduces its piece of the chunk out of all windows into its own, and everyone copies the finals out of those. What is passed on stays
// in the caches that the ranks share: an input is read from memory once, a result written there once. (Parsons and Pai 2014; Jain et al.,
// "Framework for scalable intra-node collective operations using shared memory", 2018.)
//
// A chunk is a piece of every share, so that the owners are those of the plan. Step t: reduce chunk t - 1, copy the finals of chunk t - 2,
// stage chunk t. Nobody begins a step before all are through with the one before; so two places for inputs, and two for results, are
// enough: who writes to one knows that all have left what was there.
//
// A window is written by its rank only (M9), and looked into by ranks that may have been stopped meanwhile: as of a rank that is read (C9),
// what was copied counts only if the ticket in the window still stands. Where it does not, the copy has cost the input; that still is in this
// rank's own window (invariant B).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/run.h"
#include "collectives/ticket.h"

namespace ftcomm {

namespace {

constexpr std::uint64_t kLine = 64;
// Inputs twice, and results: of sixteen ranks in segments of 64 KiB, or of three whose pieces are a third of 512 KiB.
constexpr std::uint64_t kWindow = Transport::kWindowHead + (2u << 20) + (512u << 10);
constexpr std::uint64_t kInCaches = 8u << 20;  // of all results: what is more is written past them

struct StageEntry {  // payload of StageEnter
    std::uint64_t place = 0, ticket = 0;
};

class StageRun final : public Run {
public:
    StageRun(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket)
        : env_(std::move(env)), op_(op), plan_(std::move(plan)), number_(ticket), peers_(env_.living.size()), fence_(env_, op_) {}
    ~StageRun() override {
        ticket_.reset();  // before another run has the window
        if (window_.memory != nullptr) env_.windows->push_back(window_);
    }

    void start() override {
        std::uint32_t s = 0, longest = 0;
        for (const auto& r : plan_) {
            auto& peer = peers_[static_cast<std::size_t>(env_.position_of(r.rank))];
            peer.first = s;
            peer.segments = r.count;
            longest = std::max(longest, r.count);
            s += r.count;
        }
        FT_CHECK(s == op_.grid.segments() && longest > 0, "plan covers %u of %u segments", s, op_.grid.segments());
        const auto segment = op_.grid.segment_elements * size_of(op_.desc.dtype);
        batch_ = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, env_.stage_bytes / peers_.size() / segment));
        batch_ = std::min(batch_, longest);
        place_ = (batch_ * segment + kLine - 1) / kLine * kLine;
        chunks_ = (longest + batch_ - 1) / batch_;
        FT_CHECK(Transport::kWindowHead + 2 * (peers_.size() + 1) * place_ <= kWindow, "%zu pieces of %llu bytes", peers_.size(),
                 static_cast<unsigned long long>(place_));
        if (env_.windows->empty()) {
            window_ = env_.memory->make_window(kWindow);
        } else {
            window_ = env_.windows->back();
            env_.windows->pop_back();
        }
        task_ = Task::Stage;
        if (window_.memory == nullptr) return;  // work() says so
        self().window = window_.memory;
        ticket_.emplace(reinterpret_cast<std::uint64_t*>(window_.memory), number_);
        ticket_->issue();
        std::atomic_thread_fence(
            std::memory_order_seq_cst);  // before stores past the caches, which are not ordered by themselves
        skip();
    }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        const int at = env_.position_of(from);
        if (at < 0) return;
        auto& peer = peers_[static_cast<std::size_t>(at)];
        switch (h.kind) {
            case FrameKind::StageEnter: {
                StageEntry entry;
                FT_CHECK(payload.size() == sizeof entry && peer.window == nullptr, "rank %d enters with %zu bytes", from,
                         payload.size());
                std::memcpy(&entry, payload.data(), sizeof entry);
                peer.ticket = entry.ticket;
                peer.window = env_.memory->look(env_.slot_of(from), entry.place, kWindow);
                over_ |= peer.window == nullptr;
                ++entered_;
                break;
            }
            case FrameKind::StageWord:
                FT_CHECK(env_.position == 0 && h.segment == peer.through + 1 && h.segment <= chunks_,
                         "rank %d is through %u of %u steps, after %u", from, h.segment, chunks_, peer.through);
                peer.through = h.segment;
                break;
            case FrameKind::StageGo:
                FT_CHECK(at == 0 && h.segment == all_through_ + 1, "all are through %u steps, after %u", h.segment, all_through_);
                all_through_ = h.segment;
                break;
            case FrameKind::Fence: fence_.on_frame(h); return;
            case FrameKind::Enter:
            case FrameKind::PullEnter:
            case FrameKind::GroupEnter: mismatch = true; return;  // it was called with another algorithm there
            default: return;
        }
        go_on();
    }

    bool has_work() const override { return task_ != Task::Wait && !over_; }

    // One piece: ticks and other communicators get their turn in between.
    void work() override {
        if (!has_work()) return;
        if (window_.memory == nullptr) {
            refused = true;
            task_ = Task::Wait;
            return;
        }
        switch (task_) {
            case Task::Reduce: reduce_own(); break;
            case Task::Give: give(); break;
            case Task::Stage: stage(); break;
            case Task::Wait: break;
        }
        if (over_) return;
        ++at_;
        skip();
    }

    bool done() const override { return fence_.done(); }
    const char* phase() const override {
        return entered_ < env_.size() ? "the others to enter" : !fence_.begun() ? "data" : "the completion fence";
    }

private:
    enum class Task { Reduce, Give, Stage, Wait };
    struct Peer {
        const std::byte* window = nullptr;  // it has entered, and shows this
        std::uint64_t ticket = 0;
        std::uint32_t first = 0, segments = 0;  // its share
        std::uint32_t through = 0;  // so many steps, after the one with which it entered: of others position 0 knows it
    };
    struct Piece {
        std::uint32_t segment = 0, segments = 0;
    };

    Peer& peer_at(int position) { return peers_[static_cast<std::size_t>(position)]; }
    Peer& self() { return peer_at(env_.position); }

    // Of chunk `chunk`, what the position owns.
    Piece piece(std::uint32_t chunk, int position) {
        const auto& peer = peer_at(position);
        const auto from = std::min(chunk * batch_, peer.segments);
        return {peer.first + from, std::min(batch_, peer.segments - from)};
    }
    std::size_t bytes(const Piece& p) const { return op_.grid.count(p.segment, p.segments) * size_of(op_.desc.dtype); }
    std::uint64_t input_at(std::uint32_t chunk, int position) const {
        return Transport::kWindowHead + (2 + chunk % 2 * peers_.size() + static_cast<std::size_t>(position)) * place_;
    }
    std::uint64_t result_at(std::uint32_t chunk) const { return Transport::kWindowHead + chunk % 2 * place_; }

    // To the next piece that there is something to do for, or to the end of the step.
    void skip() {
        for (;; ++at_) {
            const bool once = task_ == Task::Reduce;
            if (task_ == Task::Wait) return;
            if (at_ == (once ? 1 : env_.size())) {
                at_ = -1;
                if (task_ == Task::Reduce) task_ = Task::Give;
                else if (task_ == Task::Give) task_ = Task::Stage;
                else return end_step();
                continue;
            }
            // What this rank owns it reduces from where it is.
            if (task_ == Task::Reduce ? step_ <= chunks_ && piece(step_ - 1, env_.position).segments > 0
                : task_ == Task::Give ? step_ >= 2 && piece(step_ - 2, at_).segments > 0
                                      : step_ < chunks_ && at_ != env_.position && piece(step_, at_).segments > 0)
                return;
        }
    }

    void stage() {
        const auto p = piece(step_, at_);
        env_.shared->copy(window_.memory + input_at(step_, at_), op_.input(p.segment), bytes(p));
        FT_POINT("stage.input");
    }

    // In the order of the ranks, whoever owns the segments.
    void reduce_own() {
        const auto chunk = step_ - 1;
        const auto p = piece(chunk, env_.position);
        inputs_.clear();
        for (int i = 0; i < env_.size(); ++i)
            inputs_.push_back(i == env_.position ? op_.input(p.segment) : peer_at(i).window + input_at(chunk, env_.position));
        const auto divisor = op_.desc.op == ReduceOp::Avg ? static_cast<std::uint32_t>(env_.size()) : 1;
        const bool past = env_.shared->way() == Into::Memory;
        if (past && env_.scratch->size() < bytes(p)) env_.scratch->resize(bytes(p));
        auto* to = window_.memory + result_at(chunk);
        auto* sum = past ? env_.scratch->data() : to;
        combine(op_.desc.dtype, op_.desc.op, sum, inputs_, op_.grid.count(p.segment, p.segments), divisor);
        if (past) copy_past_cache(to, sum, bytes(p));
        for (int i = 0; i < env_.size(); ++i) over_ |= !stands(i);  // then it is nobody's
        FT_POINT("stage.reduce");
        FT_POINT("collective.part");
    }

    void give() {
        const auto chunk = step_ - 2;
        const auto p = piece(chunk, at_);
        auto* to = op_.result(p.segment);
        const auto all = op_.grid.block_elements * size_of(op_.desc.dtype) * peers_.size();
        copy(to, peer_at(at_).window + result_at(chunk), bytes(p), into_for(all, kInCaches));
        if (!stands(at_)) {
            over_ = true;
            std::memcpy(to, window_.memory + input_at(chunk, at_), bytes(p));
            return;
        }
        for (std::uint32_t s = p.segment; s < p.segment + p.segments; ++s) op_.set_final(s, plan_.front().contributors);
        FT_POINT("stage.final");
        FT_POINT("collective.part");
    }

    // C9. Loads of the window are not moved behind it.
    bool stands(int position) {
        if (position == env_.position || !env_.rules.c9) return true;
        auto& peer = peer_at(position);
        std::atomic_thread_fence(std::memory_order_acquire);
        auto* word = reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(peer.window));  // NOLINT: atomic_ref reads it
        return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire) == peer.ticket;
    }

    void end_step() {
        task_ = Task::Wait;
        if (step_ > chunks_) {  // all finals are here
            fence_.begin();
            return;
        }
        if (step_ == 0) {
            FT_POINT("stage.enter");
            const StageEntry entry{window_.place, number_};
            for (int i = 1; i < env_.size(); ++i)
                send(env_.position + i, FrameKind::StageEnter, 0, std::as_bytes(std::span(&entry, 1)));
            ++entered_;
        } else if (env_.position != 0) {
            send(0, FrameKind::StageWord, step_);
        }
        self().through = step_;
        FT_POINT("stage.step");
        go_on();
    }

    void send(int position, FrameKind kind, std::uint32_t step, ByteView payload = {}) {
        auto h = env_.header(kind, op_);
        h.segment = step;
        env_.sender.send(env_.slot_of(env_.rank_at(position)), h, payload);
    }

    // If all are through with the step that this rank waits in.
    void go_on() {
        if (task_ != Task::Wait || fence_.begun() || entered_ < env_.size()) return;
        if (env_.position == 0) {
            const auto last = std::ranges::min(peers_, {}, &Peer::through).through;
            while (all_through_ < last) {
                ++all_through_;
                for (int i = 1; i < env_.size(); ++i) send(i, FrameKind::StageGo, all_through_);
            }
        }
        if (all_through_ < step_) return;
        ++step_;
        task_ = Task::Reduce;
        at_ = 0;
        skip();
    }

    RunEnv env_;
    OpState& op_;
    const std::vector<SegmentRun> plan_;
    const std::uint64_t number_;
    Transport::Window window_;
    std::optional<Ticket> ticket_;
    std::vector<Peer> peers_;  // by position
    std::vector<const std::byte*> inputs_;
    int entered_ = 0;
    std::uint32_t batch_ = 1, chunks_ = 0;  // segments of a piece; chunks
    std::uint64_t place_ = 0;  // bytes that a piece has in a window
    std::uint32_t step_ = 0, all_through_ = 0;
    Task task_ = Task::Wait;
    int at_ = 0;  // the position whose piece it is
    bool over_ = false;  // a ticket has fallen: this attempt gets nowhere
    Fence fence_;
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
