// What a program receives: the records of each stream, in order, and which receive gets which.
#include <algorithm>
#include <utility>

#include "base/copy.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "communicator/logged_pairs.h"

namespace ftcomm {

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
                                                  into_for(record.payload.size(), kLongReceived)) != *record.crc)) {
            status = log_.find(from(src), message->seq, &record);
            if (status) copy_bytes(r.data, record.payload.data(), record.payload.size());
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

}  // namespace ftcomm
