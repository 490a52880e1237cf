#include "collectives/window_run.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/fault_tolerance.h"

namespace ftcomm {

namespace {

struct StageEntry {  // payload of StageEnter, of who shows something
    std::uint64_t place = 0, ticket = 0;
};

}  // namespace

WindowRun::WindowRun(RunEnv env, OpState& op, std::uint64_t ticket)
    : env_(std::move(env)), op_(op), number_(ticket), peers_(env_.living.size()), fence_(env_, op_) {}

WindowRun::~WindowRun() {
    ticket_.reset();  // before another run has the window
    if (window_.memory != nullptr) env_.windows->push_back(window_);
}

void WindowRun::start() {
    form_ = form();
    awaited_ = form_.looking == kAll || form_.looking == env_.position ? form_.showing.count() : 0;
    FT_CHECK(!form_.showing.empty() && place(form_.places) <= kWindow, "%llu pieces of %llu bytes",
             static_cast<unsigned long long>(form_.places), static_cast<unsigned long long>(form_.place));
    lacks_room_ = form_.showing.has(env_.position) && !take_window();
    FT_CHECK(kFaultTolerant || !lacks_room_,
             "no room for a window, and nobody can vote on it: set FTCOMM_STAGE_LIMIT=1099511627776");
    if (lacks_room_) return;
    task_ = 0;
    skip();
}

bool WindowRun::take_window() {
    if (env_.windows->empty()) {
        window_ = env_.memory->make_window(kWindow);
    } else {
        window_ = env_.windows->back();
        env_.windows->pop_back();
    }
    if (window_.memory == nullptr) return false;
    self().window = window_.memory;
    ticket_.emplace(reinterpret_cast<std::uint64_t*>(window_.memory), number_);
    ticket_->issue();
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before stores past the caches, which are not ordered by themselves
    return true;
}

void WindowRun::on_frame(int from, const FrameHeader& h, ByteView payload) {
    const int at = env_.position_of(from);
    if (at < 0) return;
    auto& peer = peers_[static_cast<std::size_t>(at)];
    switch (h.kind) {
        case FrameKind::StageEnter: {
            if (!form_.showing.has(at)) return;  // it is there: that was all
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
            FT_CHECK(env_.position == 0 && h.segment == peer.through + 1 && h.segment <= form_.last_step,
                     "rank %d is through %u of %u steps, after %u", from, h.segment, form_.last_step, peer.through);
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

void WindowRun::work() {
    if (!has_work()) return;
    if (lacks_room_) {
        no_window = over_ = true;
        return;
    }
    do_piece(task_, at_);
    if (over_) return;
    ++at_;
    skip();
}

// To the next piece that there is something to do for, or to the end of the step.
void WindowRun::skip() {
    for (; task_ < tasks(); ++task_, at_ = 0)
        for (; at_ < env_.size(); ++at_)
            if (is_due(task_, at_)) return;
    end_step();
}

bool WindowRun::stands(int position) {
    if (position == env_.position || !env_.rules.c9) return true;
    auto& peer = peers_[static_cast<std::size_t>(position)];
    std::atomic_thread_fence(std::memory_order_acquire);
    auto* word = reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(peer.window));  // NOLINT: atomic_ref reads it
    return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire) == peer.ticket;
}

void WindowRun::enter() {
    FT_POINT("stage.enter");
    if (form_.showing.has(env_.position)) {
        const StageEntry entry{window_.place, number_};
        const auto bytes = std::as_bytes(std::span(&entry, 1));
        if (form_.looking == kAll) tell_all(FrameKind::StageEnter, 0, bytes);
        else send(form_.looking, FrameKind::StageEnter, 0, bytes);
        ++entered_;
    } else if (form_.looking == kAll) {
        // So that ranks which name each other as the root notice.
        send(form_.showing.lowest(), FrameKind::StageEnter, 0);
    } else {
        // Nor is anybody to be left who has called something else, which failed at once (a dead root), and would hear of this from nobody.
        tell_all(FrameKind::StageEnter, 0);
    }
}

void WindowRun::tell_all(FrameKind kind, std::uint32_t step, ByteView payload) {
    for (int i = 1; i < env_.size(); ++i) send(env_.position + i, kind, step, payload);
}

void WindowRun::end_step() {
    task_ = -1;
    if (step_ == form_.last_step) {  // all finals are here
        fence_.begin();
        return;
    }
    if (step_ == 0) enter();
    else if (env_.position != 0) send(0, FrameKind::StageWord, step_);
    self().through = step_;
    FT_POINT("stage.step");
    go_on();
}

void WindowRun::send(int position, FrameKind kind, std::uint32_t step, ByteView payload) {
    auto h = env_.header(kind, op_);
    h.segment = step;
    env_.sender.send(env_.slot_of(env_.rank_at(position)), h, payload);
}

// If all are through with the step that this rank waits in.
void WindowRun::go_on() {
    if (task_ >= 0 || lacks_room_ || fence_.begun() || entered_ < awaited_) return;
    if (env_.position == 0) {
        const auto last = std::ranges::min(peers_, {}, &Peer::through).through;
        while (all_through_ < last) {
            ++all_through_;
            tell_all(FrameKind::StageGo, all_through_);
        }
    }
    if (all_through_ < step_) return;
    ++step_;
    task_ = 0;
    at_ = 0;
    skip();
}

void Shares::lay_out(const RunEnv& env, const OpState& op, const std::vector<SegmentRun>& plan, std::size_t pieces) {
    shares_.resize(env.living.size());
    std::uint32_t s = 0, longest = 0;
    for (const auto& r : plan) {
        shares_[static_cast<std::size_t>(env.position_of(r.rank))] = {s, r.count};
        longest = std::max(longest, r.count);
        s += r.count;
    }
    FT_CHECK(s == op.grid.segments() && longest > 0, "plan covers %u of %u segments", s, op.grid.segments());
    const auto segment = op.grid.segment_elements * size_of(op.desc.dtype);
    batch_ = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, env.stage_bytes / pieces / segment));
    batch_ = std::min(batch_, longest);
    chunks_ = (longest + batch_ - 1) / batch_;
    place_ = batch_ * segment;
}

Shares::Piece Shares::piece(std::uint32_t chunk, int position) const {
    const auto& share = shares_[static_cast<std::size_t>(position)];
    const auto from = std::min(chunk * batch_, share.segments);
    return {share.first + from, std::min(batch_, share.segments - from)};
}

RankSet Shares::owners() const {
    RankSet out;
    for (std::size_t i = 0; i < shares_.size(); ++i)
        if (shares_[i].segments > 0) out.add(static_cast<int>(i));
    return out;
}

}  // namespace ftcomm
