#include "communicator/logged_pairs.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/copy.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "communicator/p2p.h"

namespace ftcomm {

namespace {

std::string hex(std::uint32_t crc) {
    char text[12];
    std::snprintf(text, sizeof text, "%08x", crc);
    return text;
}

}  // namespace

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

void LoggedPairs::send(const RequestPtr& request, const void* data, std::uint64_t bytes, int dst, std::int64_t tag,
                       Time deadline) {
    if (hollow_ && (is_direct(dst) || !was_sent(dst))) {
        core_.finish(request, no_content(dst));
        return;
    }
    if (is_direct(dst)) {
        ++peer(dst).sent;
        direct_->send(request, data, bytes, dst, tag, deadline);
        return;
    }
    const ByteView payload(static_cast<const std::byte*>(data), bytes);
    request->bytes = bytes;
    log_.set_position(next_position(dst));
    if (was_sent(dst)) {
        send_again(request, payload, dst, tag);
        return;
    }
    if (!may_send(request)) return;
    bool held = false;
    if (auto status = log(request, payload, dst, tag, &held); !status) {
        core_.finish(request, std::move(status));
        return;
    }
    is_sent(dst, held);
    if (!held) core_.finish(request, {});
}

void LoggedPairs::send_made(const RequestPtr& request, std::uint64_t bytes, int dst, std::int64_t tag, const Log::Make& make) {
    request->bytes = bytes;
    const bool again = was_sent(dst);
    if (again || (log_.is_late() && !log_.readable(slot_of(dst)))) {  // to be compared, or logged later
        Bytes payload(bytes);
        std::optional<std::uint32_t> sum;
        if (auto status = make(payload.data(), 0, bytes, &sum); !status) core_.finish(request, std::move(status));
        else send(request, payload.data(), bytes, dst, tag);
        return;
    }
    if (!may_send(request)) return;
    log_.set_position(next_position(dst));
    auto status = log_.append_made(to(dst), tag, 0, bytes, make);
    if (status) is_sent(dst, false);
    core_.finish(request, std::move(status));
}

// L1: this process does again what one before it has done.
void LoggedPairs::send_again(const RequestPtr& request, ByteView payload, int dst, std::int64_t tag) {
    LogRecord record;
    auto status = log_.find(to(dst), peer(dst).sent + 1, &record);
    if (status) status = compare(record, payload, tag, dst);
    if (status) {
        ++peer(dst).sent;
        ++replayed_;
    }
    core_.finish(request, std::move(status));
}

bool LoggedPairs::may_send(const RequestPtr& request) {
    if (!core_.rules.l1 && replaying_) {  // rule L1 switched off: "a process before this one has sent it"
        core_.finish(request, {});
        return false;
    }
    caught_up_();
    FT_POINT("channel.send.before");
    return true;
}

void LoggedPairs::is_sent(int dst, bool held) {
    ++peer(dst).sent;
    FT_POINT("channel.send.logged");
    if (dst == rank_) {
        look(dst);
        match();
    } else {
        // The caller is not kept while a large message goes out, but goes on computing.
        peer(dst).later |= held;
        core_.has_work |= held;
        mark(dst);
    }
}

void LoggedPairs::set_position(std::uint64_t iteration, std::optional<std::uint32_t> micro_batch) {
    iteration_ = iteration;
    micro_batch_ = micro_batch;
    for (auto& p : peers_) p.in_iteration = 0;
}

LogPosition LoggedPairs::next_position(int dst) { return {iteration_, micro_batch_.value_or(peer(dst).in_iteration++)}; }

// Between hosts nobody but this process and its replacement reads the record, and the replacement sends again what it does not find: it may
// be written later. Until then a large message stays in the caller's buffer, whose send is not done; a small one is copied (B).
// On one host the record is the message.
Status LoggedPairs::log(const RequestPtr& request, ByteView payload, int dst, std::int64_t tag, bool* held) {
    const bool here = log_.readable(slot_of(dst));
    if (here && payload.size() > 4 * stretch(0) && reachable(dst) && channel_ == Channel::Messages)
        return log_shown(payload, dst, tag);
    if (!log_.is_late() || here) return log_.append(to(dst), tag, 0, std::span(&payload, 1));
    if (channel_ != Channel::Messages || payload.size() <= core_.config.eager_limit) {  // a ring goes on with its buffer at once
        auto copy = log_.scratch(payload.size());
        copy.assign(payload.begin(), payload.end());
        return log_.append_later(to(dst), tag, 0, copy);
    }
    *held = true;
    return log_.append_held(to(dst), tag, 0, payload, [&core = core_, request] { core.finish(request, {}); });
}

Status LoggedPairs::no_content(int dst) const {
    auto s =
        Status::error(Code::Invalid, "message #" + std::to_string(peer(dst).sent + 1) + " to rank " + std::to_string(dst) +
                                         " of communicator " + spec_.name +
                                         " is not in the log, and was not computed: it is not sent. Do this step again for real");
    s.ranks = {dst};
    return s;
}

LoggedPairs::Ahead LoggedPairs::ahead() {
    Ahead out;
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
        look(r);
        const auto& p = peer(r);
        const auto last = is_direct(r) ? 0 : log_.last(to(r));  // of its group nothing is in the log
        out.sends.push_back(last > p.sent ? last - p.sent : 0);
        out.receives.push_back(is_direct(r) ? 0 : p.waiting.size());
    }
    return out;
}

Status LoggedPairs::logged(int dst, std::uint64_t seq, LogRecord* out) {
    if (dst < 0 || dst >= static_cast<int>(peers_.size()) || is_direct(dst) || seq < 1 || seq > log_.last(to(dst)))
        return Status::error(Code::Invalid,
                             "message #" + std::to_string(seq) + " to rank " + std::to_string(dst) + " is in no log");
    auto status = log_.peek(to(dst), seq, out);
    if (status && !out->crc) status = log_.find(to(dst), seq, out);  // which computes it
    return status;
}

// What differs is an error of the program, or of the machine: nothing is overwritten, and the receiver is not told.
Status LoggedPairs::compare(const LogRecord& record, ByteView data, std::int64_t tag, int dst) const {
    if (hollow_ && record.tag == tag && record.payload.size() == data.size()) return {};
    const auto crc = crc32c(data.data(), data.size());
    if (record.tag == tag && record.payload.size() == data.size() && record.crc == crc) return {};
    const auto text = [](std::int64_t t, std::size_t bytes, std::uint32_t sum) {
        return std::to_string(bytes) + " bytes with tag " + std::to_string(t) + ", CRC-32C " + hex(sum);
    };
    const auto& at = record.position;
    const auto where = at.iteration == 0 && at.micro_batch == 0 ? std::string()
                                                                : " (iteration " + std::to_string(at.iteration) +
                                                                      ", micro-batch " + std::to_string(at.micro_batch) + ")";
    auto s =
        Status::error(Code::ReplayDiverged,
                      "message #" + std::to_string(record.seq) + where + " to rank " + std::to_string(dst) + " of communicator " +
                          spec_.name + " was " + text(record.tag, record.payload.size(), record.crc.value_or(0)) +
                          ", and is now " + text(tag, data.size(), crc) +
                          ": the program does not do the same again. Seed its generators, take no decision from time or "
                          "thread order, use ftcomm.recovery.deterministic(), and start it from a fresh log");
    s.operation = "ft_send #" + std::to_string(record.seq);
    s.ranks = {dst};
    return s;
}

// One frame tells the receiver how far the stream goes; to another host the records themselves go, when asked for.
void LoggedPairs::mark(int rank) {
    if (!reachable(rank) || is_direct(rank)) return;
    if (log_.readable(slot_of(rank))) {
        auto h = header(FrameKind::LogMark);
        h.seq = log_.last(to(rank));
        if (h.seq > 0) core_.sender.send(slot_of(rank), h);
        FT_POINT("channel.send.marked");
    } else if (!peer(rank).later) {
        stream(rank, kAllPieces);
    }
    peer(rank).told = incarnation(rank);
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

// --- receiving

void LoggedPairs::recv(const RequestPtr& request, void* data, std::uint64_t bytes, int src, std::int64_t tag, Time deadline) {
    Recv r{request, static_cast<std::byte*>(data), bytes, std::max(src, -1), tag, deadline, 0, src < 0};
    r.number = ++asked_[{r.src, tag}];
    if (const auto it = answers_.find(asked(r)); it != answers_.end()) {  // L5: as it was answered before
        r.answered = true;
        if (it->second.failure) {
            core_.finish(request, it->second.failure->status(""));
            return;
        }
        r.src = it->second.source;
    }
    for (int s = 0; s < static_cast<int>(peers_.size()); ++s)
        if (r.src < 0 || r.src == s) {
            look(s);
            want(s);
        }
    match();  // what has come since the last frame belongs to the receives before this one
    if (match_one(r)) return;
    if (!core_.solo && !(r.src >= 0 && is_direct(r.src))) caught_up_();  // what is in no log says nothing of that
    recvs_.push_back(std::move(r));
    if (const int from = recvs_.back().src; from >= 0) follow(from);
    end_hopeless();
}

void LoggedPairs::on_direct(PointToPoint::Arrived message) {
    auto& p = peer(message.src);
    p.waiting.push_back({++p.seen, message.tag, message.bytes, std::make_unique<PointToPoint::Arrived>(std::move(message))});
    match();
}

void LoggedPairs::look(int rank) {
    if (is_direct(rank)) return;
    auto& p = peer(rank);
    // Before the process has said where it goes on, what comes after the resume point is not looked at (L6).
    const auto last = log_.is_split() && !log_.reading() ? log_.base(from(rank)) : log_.last(from(rank));
    if (auto s = log_.state(from(rank)); !s) {
        broke(std::move(s));
        return;
    }
    while (p.seen < last) {
        LogRecord record;
        if (auto s = log_.peek(from(rank), p.seen + 1, &record); !s) {  // checked when it is taken
            broke(std::move(s));
            return;
        }
        ++p.seen;
        p.waiting.push_back({record.seq, record.tag, record.payload.size()});
    }
}

void LoggedPairs::match() {
    for (auto it = recvs_.begin(); it != recvs_.end();) {
        if (match_one(*it)) it = recvs_.erase(it);
        else ++it;
    }
    if (!broken_) fail_all(broken_);
}

bool LoggedPairs::match_one(Recv& r) {
    for (int s = 0; s < static_cast<int>(peers_.size()); ++s) {
        if (r.src >= 0 && r.src != s) continue;
        auto& waiting = peer(s).waiting;
        for (auto it = waiting.begin(); it != waiting.end(); ++it)
            if (it->tag == r.tag || (r.tag == kAnyTag && channel_ == Channel::Ring)) return take(r, s, it);
    }
    return false;
}

bool LoggedPairs::take(Recv& r, int src, std::deque<Message>::iterator message) {
    Status status = r.any ? remember(r, {src, std::nullopt}) : Status{};
    r.request->source = src;
    r.request->bytes = message->bytes;
    if (status && message->bytes > r.capacity) status = message_too_long(message->bytes, src, r.capacity);
    auto& p = peer(src);
    if (message->direct != nullptr && (status || status.code == Code::Truncated)) {
        const auto direct = std::move(message->direct);
        p.waiting.erase(message);
        ++p.taken;
        FT_POINT("unlogged.receive");
        direct_->receive(r.request, r.data, r.capacity, *direct);
        return true;
    }
    const bool there = status && p.into == r.request && message->seq == p.open &&  // it was put there as it came
                       (p.shown.seq != p.open || copy_rest(r, src, message->seq));
    if (status && message->bytes > 0 && !there && r.data != nullptr) {
        LogRecord record;
        status = log_.peek(from(src), message->seq, &record);
        // Checked as it is copied; find() has the words for what is wrong with it.
        if (status && (!record.crc || crc32c_copy(r.data, record.payload.data(), record.payload.size(), 0,
                                                  into_for(record.payload.size())) != *record.crc)) {
            status = log_.find(from(src), message->seq, &record);
            if (status) std::memcpy(r.data, record.payload.data(), record.payload.size());
        }
    }
    if (p.into == r.request) p.into = nullptr;
    FT_POINT("channel.receive");
    if (status || status.code == Code::Truncated) {  // else it is still to be had
        p.waiting.erase(message);
        ++p.taken;
    }
    core_.finish(r.request, std::move(status));
    return true;
}

Status LoggedPairs::check_received(int src) {
    LogRecord record;
    return log_.find(from(src), peer(src).taken, &record);
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

// Asks a rank of another host for its records, once for each of its incarnations.
void LoggedPairs::want(int rank) {
    auto& p = peer(rank);
    if (!reachable(rank) || is_direct(rank) || p.asked == incarnation(rank) || core_.solo || !log_.reading() ||
        log_.readable(slot_of(rank)))
        return;
    p.asked = incarnation(rank);
    look(rank);  // of what is in this host's half nothing is asked for
    p.open = 0;
    auto h = header(FrameKind::LogWant);
    h.seq = p.seen + 1;
    core_.sender.send(slot_of(rank), h);
}

// The receive that it is for, if that is known already, gets it piece by piece; the log gets it whole.
void LoggedPairs::begin_message(int rank, const FrameHeader& h) {
    auto& p = peer(rank);
    p.open = h.seq;
    p.arrived = 0;
    p.into = nullptr;
    const auto fits = [&](const Recv& r) { return r.tag == static_cast<std::int64_t>(h.aux) && (r.src < 0 || r.src == rank); };
    const auto it = std::find_if(recvs_.begin(), recvs_.end(), fits);
    if (it == recvs_.end() || it->src < 0 || it->data == nullptr || it->capacity < h.aux2)
        return;  // one from anyone may be answered by another yet
    p.into = it->request;
    p.into_data = it->data;
}

void LoggedPairs::on_piece(int rank, const FrameHeader& h, ByteView payload) {
    auto& p = peer(rank);
    if (h.seq != p.seen + 1 || !broken_) return;  // L1: of what is here already
    if (h.step >> 1 < log_age(rank)) return;  // from an older log, which the vote will find out
    if ((h.step & 1) != log_.part_of(from(rank), h.seq)) {
        p.early = true;  // the sender is past its resume point, this rank is not: asked for again then
        return;
    }
    if ((h.flags & kFirstPiece) != 0) begin_message(rank, h);
    else if (p.open != h.seq) return;  // its first piece came too early
    FT_CHECK(h.seq == log_.last(from(rank)) + 1, "message %llu, after %llu in the log", static_cast<unsigned long long>(h.seq),
             static_cast<unsigned long long>(log_.last(from(rank))));
    const auto at = p.arrived;
    FT_CHECK(at + payload.size() <= h.aux2, "%zu bytes of a message of %llu", static_cast<std::size_t>(at) + payload.size(),
             static_cast<unsigned long long>(h.aux2));
    const auto tag = static_cast<std::int64_t>(h.aux);
    std::uint32_t crc = 0;
    if (auto s = log_.append_piece(from(rank), tag, 0, h.aux2, at, payload, &crc); !s) {
        broke(std::move(s));
        return;
    }
    if (p.into != nullptr && !p.into->done.load(std::memory_order_relaxed) && !payload.empty())
        copy(p.into_data + at, payload.data(), payload.size(), into_for(h.aux2));
    p.arrived += payload.size();
    if (p.arrived < h.aux2) return;
    end_message(rank, h, crc);
}

// In this host's half, and so seen by a receive, only if it is what the sender's log says; else it stays without a commit.
void LoggedPairs::end_message(int rank, const FrameHeader& h, std::uint32_t crc) {
    auto& p = peer(rank);
    if ((h.flags & kSummedPiece) != 0 && crc != h.attempt) {
        broke(Status::error(Code::LogCorrupt, "message #" + std::to_string(h.seq) + " from rank " + std::to_string(rank) +
                                                  " of communicator " + spec_.name + " is damaged in its sender's log: its " +
                                                  std::to_string(h.aux2) + " bytes were logged with the CRC-32C " +
                                                  hex(h.attempt) + ", and have " + hex(crc)));
        return;
    }
    if (auto s = log_.commit_pieces(from(rank)); !s) {
        broke(std::move(s));
        return;
    }
    FT_POINT("channel.arrived");
    look(rank);
    match();
    p.into = nullptr;
    p.open = 0;
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
