// What a program sends: logged, or compared with what a process before it has sent (L1).
#include <string>
#include <utility>

#include "base/crc32c.h"
#include "base/failpoint.h"
#include "communicator/logged_pairs.h"

namespace ftcomm {

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
    if (refused_before(request, dst)) return;
    if (was_sent(dst)) {
        send_again(request, payload, dst, tag);
        return;
    }
    if (!may_send(request)) return;
    bool held = false;
    if (auto status = log(request, payload, dst, tag, &held); !status) {
        refuse(request, dst, std::move(status));
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
        peer(dst).refused = 0;
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
    peer(dst).refused = 0;
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
    if (!log_.is_late() || here)
        return here || payload.size() <= 4 * core_.config.eager_limit || !reachable(dst)
                   ? log_.append(to(dst), tag, 0, std::span(&payload, 1))
                   : log_streamed(payload, dst, tag);
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
        return std::to_string(bytes) + " bytes with tag " + std::to_string(t) + ", CRC-32C " + crc_text(sum);
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

}  // namespace ftcomm
