#include "communicator/logged_pairs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "communicator/p2p.h"

namespace ftcomm {

LogKey LoggedPairs::key(const CommSpec& spec, Channel channel, int src, int dst) {
    if (channel == Channel::Messages) return {spec.id, src, dst};
    ByteWriter w;
    w.put(spec.id).put(channel);
    return {hash64(w.view()), src, dst};
}

// As far as it goes into a frame's header.
int LoggedPairs::log_age(int rank) const {
    return static_cast<int>(std::min<std::uint32_t>(log_since_[static_cast<std::size_t>(rank)], 0x7fff));
}

FrameHeader LoggedPairs::header(FrameKind kind) const {
    FrameHeader h;
    h.kind = kind;
    h.comm = spec_.id;
    h.segment = static_cast<std::uint32_t>(channel_);
    return h;
}

LoggedPairs::LoggedPairs(Core& core, const CommSpec& spec, int rank, Channel channel, PhasedLog& log,
                         const std::vector<std::uint32_t>& log_since, const bool& replaying, std::function<void()> caught_up,
                         PointToPoint* direct)
    : core_(core),
      spec_(spec),
      rank_(rank),
      channel_(channel),
      log_(log),
      log_since_(log_since),
      replaying_(replaying),
      caught_up_(std::move(caught_up)),
      direct_(direct),
      peers_(spec.members.size()),
      heard_(spec.members.size()) {
    if (channel_ == Channel::Messages) {  // nobody receives from the ring's streams but the ring
        read_answers();
        read_heard();
    }
    if (direct_ == nullptr) return;
    // Of a member that is in this rank's view, no other process than this rank has spoken to is in it (G1): once both are in.
    direct_->carry_group({[this](int r) { return reachable(r) && !core_.solo; },
                          [this](PointToPoint::Arrived message) { on_direct(std::move(message)); },
                          // Not on record, so it must not be what the program goes on from.
                          [this](Status status) { broke(std::move(status)); }});
}

void LoggedPairs::on_view() {
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
        auto& p = peer(r);
        if (!reachable(r)) continue;
        p.met = true;
        if (p.told != incarnation(r)) {
            p.wanted = p.wanted_offset = 0;  // that was its predecessor
            if (told_.early) tell_answered(r, 0);
            if (told_.newest > 0) tell_answered(r, told_.newest);
            mark(r);
        }
        want(r);
    }
    if (direct_ != nullptr) direct_->on_back();
    end_hopeless();
}

// Who has left sends no more; a record that cannot be read stands in the way of all that follow.
void LoggedPairs::end_hopeless() {
    for (auto it = recvs_.begin(); it != recvs_.end();) {
        const auto* m = it->src >= 0 ? &core_.view.members[static_cast<std::size_t>(slot_of(it->src))] : nullptr;
        // One of the group that left before this process came in will be started again, for what it said to this process's predecessor.
        const bool comes_back = m != nullptr && is_direct(it->src) && !peer(it->src).met;
        if (m == nullptr || m->alive || m->evidence != Evidence::Left || it->src == rank_ || comes_back) {
            ++it;
            continue;
        }
        look(it->src);
        if (!match_one(*it)) {
            auto s = Status::error(Code::PeerFailure,
                                   "rank " + std::to_string(it->src) + " has left, and all that it sent is received");
            s.ranks = {it->src};
            s.evidence = {Evidence::Left};
            core_.finish(it->request, std::move(s));
        }
        it = recvs_.erase(it);
    }
    for (int r = 0; r < static_cast<int>(peers_.size()) && direct_ != nullptr; ++r) {
        const auto& m = core_.view.members[static_cast<std::size_t>(slot_of(r))];
        if (!m.alive && m.evidence == Evidence::Left && peer(r).met) direct_->on_left(r);
    }
    if (!broken_) fail_all(broken_);
}

// --- checkpoints

LoggedPairs::Position LoggedPairs::position() const {
    Position now;
    now.quiet = recvs_.empty() && (direct_ == nullptr || direct_->idle());
    for (const auto& p : peers_) {
        now.sent.push_back(p.sent);
        now.received.push_back(p.taken);
    }
    if (channel_ == Channel::Messages) now.answers = log_.last({spec_.id, core_.self(), kAnswers});
    return now;
}

LoggedPairs::Left LoggedPairs::left() const {
    Left out(peers_.size());
    for (std::size_t r = 0; r < peers_.size(); ++r) {
        const auto& p = peers_[r];
        for (const auto& message : p.waiting) out[r].push_back(message.seq);
        for (auto last = p.seen; !out[r].empty() && out[r].back() == last; --last) out[r].pop_back();  // look() finds them again
    }
    return out;
}

void LoggedPairs::go_to(const Position& position, const Left& left) {
    for (std::size_t r = 0; r < peers_.size(); ++r) {
        peers_[r].sent = position.sent[r];
        peers_[r].seen = peers_[r].taken = position.received[r];
        // Of its group nothing can be here that another process of this slot has received: they went on from here before this rank (G2).
        if (is_direct(static_cast<int>(r))) peers_[r].seen += peers_[r].waiting.size();
        else peers_[r].waiting.clear();
        peers_[r].open = peers_[r].shown.seq = 0;
        peers_[r].asked = ~0u;
        for (std::size_t n = 0; r < left.size() && n < left[r].size(); ++n) {
            LogRecord record;
            if (auto s = log_.peek(from(static_cast<int>(r)), left[r][n], &record); !s) {
                broke(std::move(s));
                return;
            }
            ++peers_[r].seen;
            peers_[r].waiting.push_back({record.seq, record.tag, record.payload.size()});
        }
    }
    on_view();
}

void LoggedPairs::on_resume_point() {
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
        if (!std::exchange(peer(r).early, false)) continue;
        peer(r).asked = ~0u;
        want(r);
    }
}

void LoggedPairs::collect(const Position& position) {
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
        const auto i = static_cast<std::size_t>(r);
        if (is_direct(r)) continue;
        for (auto s : {log_.collect(to(r), position.sent[i]), log_.collect(from(r), position.received[i])})
            if (!s && broken_) broke(std::move(s));
    }
}

// --- frames

void LoggedPairs::on_frame(int from, const FrameHeader& h, ByteView payload) {
    switch (h.kind) {
        case FrameKind::LogMark: look(from); break;
        case FrameKind::LogWant:
            peer(from).wanted = h.seq;
            peer(from).wanted_offset = 0;
            stream(from, kAllPieces);
            return;
        case FrameKind::LogPiece: on_piece(from, h, payload); break;
        case FrameKind::LogShown: on_shown(from, h); return;
        case FrameKind::LogAnswered: on_answered(from, h.seq); return;
        default: return;
    }
    match();
}

// --- ends

void LoggedPairs::on_tick(Time now) {
    for (auto it = recvs_.begin(); it != recvs_.end();) {
        if (it->deadline == 0 || now <= it->deadline) {
            ++it;
            continue;
        }
        const bool gone = it->src >= 0 && it->src != rank_ && !reachable(it->src);
        auto s = no_message(it->src, it->tag);
        if (gone) {
            s.code = Code::PeerFailure;
            s.message = "rank " + std::to_string(it->src) +
                        " died and no replacement came within the timeout. Start one, or raise the timeout";
        }
        s.operation = "ft_recv in communicator " + spec_.name;
        give_up(*it, std::move(s));
        it = recvs_.erase(it);
    }
}

void LoggedPairs::postpone(Time deadline) {
    for (auto& r : recvs_)
        if (r.deadline != 0) r.deadline = std::max(r.deadline, deadline);
    if (direct_ != nullptr) direct_->postpone(deadline);
}

bool LoggedPairs::cancel(const RequestPtr& request) {
    for (auto it = recvs_.begin(); it != recvs_.end(); ++it) {
        if (it->request != request) continue;
        give_up(*it, Status::error(Code::Cancelled, "the receive was cancelled"));
        recvs_.erase(it);
        return true;
    }
    if (!log_.is_late()) return false;
    log_.release_all();  // a send is done as soon as its buffer is the caller's again
    return request->done.load(std::memory_order_relaxed);
}

void LoggedPairs::fail_all(const Status& status) {
    log_.release_all();
    for (auto& r : recvs_) core_.finish(r.request, status);
    recvs_.clear();
}

bool LoggedPairs::waits_for(int rank) const {
    return std::any_of(recvs_.begin(), recvs_.end(), [&](const Recv& r) { return r.src == rank; });
}

}  // namespace ftcomm
