#include "collectives/window_run.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/fault_tolerance.h"
#include "transport/ticket_word.h"

namespace ftcomm {

namespace {

// Ranks: the windows of more, all of them in use, take more of a last cache than is good for the rest.
constexpr std::size_t kFew = 4;

}  // namespace

WindowRun::WindowRun(RunEnv env, OpState& op, std::uint64_t ticket)
    : env_(std::move(env)), op_(op), number_(ticket), peers_(env_.living.size()) {}

WindowRun::~WindowRun() {
    ticket_.reset();  // before another run has the window
    if (window_.memory != nullptr) env_.windows->push_back(window_);
}

void WindowRun::start() {
    form_ = form();
    FT_CHECK(!form_.showing.empty() && Transport::kWindowHead + 2 * set_bytes() <= kWindow, "%llu pieces of %llu bytes",
             static_cast<unsigned long long>(form_.places), static_cast<unsigned long long>(form_.place));
    if (env_.shared->goes_round() && peers_.size() <= kFew) {  // from where the operation before, if it was as long, has ended
        auto& sets = self().sets;
        sets.count = most_sets();
        sets.first = static_cast<std::uint32_t>(op_.seq % sets.count * form_.last_step % sets.count);
    }
    lacks_room_ = !env_.board->open(*env_.memory) || (form_.showing.has(env_.position) && !take_window());
    FT_CHECK(kFaultTolerant || !lacks_room_,
             "no room for a window, and nobody can vote on it: set FTCOMM_STAGE_LIMIT=1099511627776");
    if (lacks_room_) return;
    introduces_ = !env_.board->all_known();
    task_ = 0;
    skip();
}

bool WindowRun::take_window() {
    if (env_.windows->empty()) {
        window_ = env_.memory->make_window(kWindow, Transport::Room::Any);
    } else {
        window_ = env_.windows->back();
        env_.windows->pop_back();
    }
    if (window_.memory == nullptr) return false;
    self().window = window_.memory;
    ticket_.emplace(reinterpret_cast<std::uint64_t*>(window_.memory), number_);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before stores past the caches, which are not ordered by themselves
    return true;
}

void WindowRun::on_frame(int from, const FrameHeader& h, ByteView payload) {
    switch (h.kind) {
        case FrameKind::StageEnter: {
            std::uint64_t place = 0;
            FT_CHECK(payload.size() == sizeof place, "rank %d enters with %zu bytes", from, payload.size());
            std::memcpy(&place, payload.data(), sizeof place);
            over_ |= !env_.board->learn(*env_.memory, from, env_.slot_of(from), place);
            break;
        }
        case FrameKind::StageGo:
            FT_CHECK(h.segment < step_ || (h.segment == step_ && task_ < 0),
                     "all are through %u steps, but not this rank, which is at %u", h.segment, step_);
            all_through_ |= h.segment == step_;
            break;
        case FrameKind::Enter:
        case FrameKind::PullEnter:
        case FrameKind::GroupEnter: mismatch = true; return;  // it was called with another algorithm there
        default: return;
    }
    go_on();
}

void WindowRun::on_tick() {
    if (task_ >= 0 || lacks_room_ || over_ || done_ || ++ticks_ != kPatience) return;
    tell_of_board();
    go_on();  // who should have told this rank may have been stopped over it
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
    const auto& peer = peers_[static_cast<std::size_t>(position)];
    return ticket_stands(*reinterpret_cast<const std::uint64_t*>(peer.window), peer.ticket);
}

void WindowRun::end_step() {
    task_ = -1;
    ticks_ = 0;
    all_through_ = false;
    if (step_ == form_.last_step) {  // all finals are here
        over_ = !logs_result(env_, op_);
        if (over_) return;
        ++step_;
        FT_POINT("fence.before");
    }
    arrive();
    go_on();
}

// Before this rank looks at the others: see Board.
void WindowRun::arrive() {
    if (step_ > 0) {
        env_.board->advance(step_);
        if (is_fence()) FT_POINT("fence.round");
        else FT_POINT("stage.step");
        return;
    }
    FT_POINT("stage.enter");
    Board::Entry entry{env_.comm, op_.seq, op_.signature, env_.attempt, 0, 0, number_, self().sets};
    if (window_.memory != nullptr) entry.window = window_.place;
    env_.board->post(entry);
    if (introduces_) tell_of_board();
}

// For which ranks this step is over when so many are through with it.
bool WindowRun::is_awaited(int position) const { return all_meet() || form_.showing.has(position); }
bool WindowRun::waits(int position) const { return all_meet() || form_.looking == kAll || form_.looking == position; }

std::optional<std::uint32_t> WindowRun::progress(int position) {
    auto& peer = peers_[static_cast<std::size_t>(position)];
    const int rank = env_.rank_at(position);
    const auto entry = env_.board->look(rank);
    if (!entry || entry->comm != env_.comm || entry->seq != op_.seq || entry->attempt != env_.attempt) return std::nullopt;
    mismatch |= entry->signature != op_.signature;
    if (mismatch || over_) return std::nullopt;
    if (peer.ticket == 0) {
        peer.ticket = entry->ticket;
        if (form_.showing.has(position)) peer.window = env_.memory->look(env_.slot_of(rank), entry->window, kWindow);
        over_ |= form_.showing.has(position) && peer.window == nullptr;
        if (entry->sets.count >= 2 && entry->sets.count <= most_sets()) peer.sets = entry->sets;
        else over_ = true;  // a mad one
    }
    return entry->through;
}

bool WindowRun::is_through(int position) {
    if (position == env_.position) return true;
    const auto last = progress(position);
    return last && *last >= step_;
}

bool WindowRun::sees_all_through() {
    for (int i = 0; i < env_.size(); ++i)
        if (is_awaited(i) && !is_through(i)) return false;
    return true;
}

// Who came before the last one cannot have seen it come; who has gone on has. (Those that introduce themselves tell everyone that they have
// entered.)
void WindowRun::tell_those_who_wait() {
    if (introduces_ && step_ == 0) return;
    for (int k = 1; k < env_.size(); ++k) {
        const int i = (env_.position + k) % env_.size();
        if (waits(i) && progress(i) == step_) send(i, FrameKind::StageGo);
    }
}

void WindowRun::go_on() {
    if (task_ >= 0 || lacks_room_ || over_ || done_) return;
    const bool awaited = is_awaited(env_.position), waits_too = waits(env_.position), told = all_through_;
    // Who is told of the first step looks as well: where the others show something is on their boards.
    const bool looks = told ? step_ == 0 : awaited || waits_too;
    if (looks && sees_all_through()) {
        all_through_ = true;
        if (!told && awaited) tell_those_who_wait();
    } else if (looks && told) {
        over_ = true;  // who has left the attempt since is not to be found any more
    }
    if (mismatch || over_ || (waits_too && !all_through_)) return;
    if (is_fence()) {
        done_ = true;
        env_.board->set_all_known();
        FT_POINT("fence.after");
        return;
    }
    ++step_;
    task_ = 0;
    at_ = 0;
    skip();
}

// Those that this rank does not see there.
void WindowRun::tell_of_board() {
    const auto place = env_.board->place();
    for (int k = 1; k < env_.size(); ++k) {
        const int i = (env_.position + k) % env_.size();
        if ((introduces_ && step_ == 0) || !is_through(i)) send(i, FrameKind::StageEnter, std::as_bytes(std::span(&place, 1)));
    }
}

void WindowRun::send(int position, FrameKind kind, ByteView payload) {
    auto h = env_.header(kind, op_);
    h.segment = step_;
    env_.sender.send(env_.slot_of(env_.rank_at(position)), h, payload);
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
