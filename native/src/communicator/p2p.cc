#include "communicator/p2p.h"

#include <algorithm>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"

namespace ftcomm {
FrameHeader PointToPoint::header(FrameKind kind, std::uint64_t number) const {
    FrameHeader h;
    h.kind = kind;
    h.comm = spec_.id;
    h.seq = number;
    return h;
}

void PointToPoint::send(const RequestPtr& request, const void* data, std::uint64_t bytes, int dst, std::int64_t tag,
                        Time deadline) {
    const auto* from = static_cast<const std::byte*>(data);
    request->bytes = bytes;
    if (dst == rank_) {
        arrived({rank_, tag, 0, bytes, false}, ByteView(from, bytes));
        core_.finish(request, {});
        return;
    }
    if (gone_.has(dst)) {
        core_.finish(request, gone_status(RankSet::of({dst})));
        return;
    }
    Send s{request, from, bytes, 0, ++next_number_[dst], dst, deadline};
    s.tag = tag;
    s.waits = group_ && !group_->is_back(dst);  // then so do all before it, and it comes behind them
    if (s.waits || !begin(s)) sends_.push_back(std::move(s));
}

// A small message is its caller's again when all of it has found room: who sends faster than it is heard waits, and nothing piles up
// here. Messages to a rank begin in order.
bool PointToPoint::begin(Send& s) {
    s.small = s.bytes <= std::min<std::uint64_t>(core_.config.eager_limit, core_.sender.max_payload());
    s.unsent = stuck_.has(s.dst) || !send_first(s);
    if (s.unsent) stuck_.add(s.dst);
    pump(s);
    if (!s.open || s.done < s.bytes) return false;
    core_.finish(s.request, {});
    return true;
}

bool PointToPoint::send_first(Send& s) {
    auto h = header(s.small ? FrameKind::Eager : FrameKind::Rts, s.number);
    h.aux = static_cast<std::uint64_t>(s.tag);
    h.aux2 = s.bytes;
    const int slot = slot_of(s.dst);
    s.frame = std::min(core_.sender.max_payload(), 128u << 10);
    if (!s.small) {
        if (!show(s, h)) core_.sender.send(slot, h);
        FT_POINT("p2p.rts");
        return true;
    }
    // On one host in pieces: what one rank writes the other one finds in its caches.
    if (!group_ && core_.transport.is_near(slot))
        s.frame = std::min(s.frame, static_cast<std::uint32_t>(core_.config.piece_bytes));
    h.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(s.bytes, s.frame));
    auto* p = core_.sender.reserve(slot, h.length);
    if (p == nullptr) return false;
    core_.sender.fill(slot, p, s.data, h.length);
    core_.sender.commit(slot, h);
    s.done = h.length;
    s.open = true;
    FT_POINT("p2p.eager");
    return true;
}

void PointToPoint::on_back() {
    for (auto it = sends_.begin(); it != sends_.end();) {
        bool finished = false;
        if (it->waits && group_->is_back(it->dst)) {
            it->waits = false;
            FT_POINT("unlogged.back");
            finished = begin(*it);
        }
        it = finished ? sends_.erase(it) : std::next(it);
    }
}

void PointToPoint::postpone(Time deadline) {
    for (auto& s : sends_) s.deadline = std::max(s.deadline, deadline);
}

bool PointToPoint::receive(const RequestPtr& request, void* data, std::uint64_t capacity, const Arrived& a) {
    Recv r{request, static_cast<std::byte*>(data), capacity, a.src, a.tag, 0};
    if (take(r, a, a.data)) return true;
    recvs_.push_back(std::move(r));
    return false;
}

void PointToPoint::recv(const RequestPtr& request, void* data, std::uint64_t bytes, int src, std::int64_t tag, Time deadline) {
    Recv r{request, static_cast<std::byte*>(data), bytes, src, tag, deadline};
    if (match_arrived(r)) return;
    if (r.matched < 0 && src >= 0 && gone_.has(src)) {
        core_.finish(request, gone_status(RankSet::of({src})));
        return;
    }
    recvs_.push_back(std::move(r));
    check_alarms();
}

bool PointToPoint::match_arrived(Recv& r) {
    for (auto it = arrived_.begin(); it != arrived_.end(); ++it) {
        if ((r.src >= 0 && it->src != r.src) || it->tag != r.tag) continue;
        const auto a = std::move(*it);
        arrived_.erase(it);
        return take(r, a, a.data);
    }
    return false;
}

// What it had matched will not come.
bool PointToPoint::match_again(Recv& r) {
    r.matched = -1;
    r.done = 0;
    r.shown = {};
    return match_arrived(r);
}

// The message `a` is r's. True when r is finished by it.
bool PointToPoint::take(Recv& r, const Arrived& a, ByteView data) {
    r.request->source = a.src;
    r.request->bytes = a.bytes;
    const bool fits = a.bytes <= r.capacity;
    const bool reads = fits && a.shown.ticket != 0;
    if (a.large) {
        // The sender need not send what will be thrown away.
        answer(a.src, a.number, !fits ? kReceived : reads ? kReading : kSendIt);
        FT_POINT("p2p.cts");
    } else if (fits && !data.empty()) {
        copy_bytes(r.data, data.data(), data.size());
    }
    if (fits && (a.large || data.size() < a.bytes)) {
        r.matched = a.src;
        r.request->alarmed = false;
        r.number = a.number;
        r.bytes = a.bytes;
        r.done = data.size();
        r.shown = a.shown;
        return can_read(r) && read(r);  // at once: whoever posted it waits for it, most likely
    }
    core_.finish(r.request, fits ? Status{} : message_too_long(a.bytes, a.src, r.capacity));
    return true;
}

void PointToPoint::answer(int rank, std::uint64_t number, Answer what) {
    auto h = header(FrameKind::Cts, number);
    h.flags = what;
    core_.sender.send(slot_of(rank), h);
}

void PointToPoint::arrived(Arrived a, ByteView data) {
    if (group_) {
        a.data.assign(data.begin(), data.end());
        group_->arrived(std::move(a));
        return;
    }
    for (auto it = recvs_.begin(); it != recvs_.end(); ++it) {
        if (it->matched >= 0 || (it->src >= 0 && it->src != a.src) || it->tag != a.tag) continue;
        if (take(*it, a, data)) recvs_.erase(it);
        return;
    }
    if (!a.large) a.data.reserve(a.bytes);
    a.data.assign(data.begin(), data.end());
    arrived_.push_back(std::move(a));
}

void PointToPoint::on_frame(int from, const FrameHeader& h, ByteView payload) {
    switch (h.kind) {
        case FrameKind::Eager:
            FT_CHECK(payload.size() <= h.aux2 && h.aux2 <= core_.config.eager_limit, "%zu of %llu bytes at once", payload.size(),
                     static_cast<unsigned long long>(h.aux2));
            arrived({from, static_cast<std::int64_t>(h.aux), h.seq, h.aux2, false}, payload);
            return;
        case FrameKind::Rts:
            arrived({from, static_cast<std::int64_t>(h.aux), h.seq, h.aux2, true, {}, shown_by(payload)});
            return;
        case FrameKind::Cts:
            for (auto it = sends_.begin(); it != sends_.end(); ++it) {
                if (it->dst != from || it->number != h.seq) continue;
                if (h.flags == kReceived) {
                    end(it, {});
                    return;
                }
                it->is_read = h.flags == kReading;
                if (it->is_read) return;
                it->open = true;
                it->ticket.reset();
                pump(*it);
                sweep();
                return;
            }
            if (h.flags == kSendIt) {  // given up meanwhile: the receiver waits on for another message
                core_.host.trace("p2p.given_up");
                give_up(from, h.seq);
            }
            return;
        case FrameKind::Data: on_data(from, h, payload); return;
        default: return;
    }
}

void PointToPoint::give_up(int rank, std::uint64_t number) {
    auto h = header(FrameKind::Data, number);
    h.flags = 1;
    core_.sender.send(slot_of(rank), h);
}

void PointToPoint::on_data(int from, const FrameHeader& h, ByteView payload) {
    const auto expect = [&](std::uint64_t done, std::uint64_t bytes) {
        FT_CHECK(h.aux == done && done + payload.size() <= bytes, "data at %llu, expected %llu of %llu",
                 static_cast<unsigned long long>(h.aux), static_cast<unsigned long long>(done),
                 static_cast<unsigned long long>(bytes));
    };
    for (auto it = recvs_.begin(); it != recvs_.end(); ++it) {
        if (it->matched != from || it->number != h.seq) continue;
        if ((h.flags & 1) != 0) {
            if (match_again(*it)) recvs_.erase(it);
            return;
        }
        expect(it->done, it->bytes);
        copy(it->data + it->done, payload.data(), payload.size(), into_for(it->bytes));
        it->done += payload.size();
        FT_POINT("p2p.data");
        if (it->done == it->bytes) {
            core_.finish(it->request, {});
            recvs_.erase(it);
        }
        return;
    }
    for (auto a = arrived_.rbegin(); a != arrived_.rend();
         ++a) {  // of a small one that nobody waits for yet; it came last, most likely
        if (a->large || a->src != from || a->number != h.seq) continue;
        if ((h.flags & 1) != 0) {
            arrived_.erase(std::next(a).base());
            return;
        }
        expect(a->data.size(), a->bytes);
        a->data.insert(a->data.end(), payload.begin(), payload.end());
        return;
    }
}

void PointToPoint::pump(Send& s) {
    const int slot = slot_of(s.dst);
    while (s.open && s.done < s.bytes) {
        const auto n = static_cast<std::uint32_t>(std::min<std::uint64_t>(s.bytes - s.done, s.frame));
        auto* p = core_.sender.reserve(slot, n);
        if (p == nullptr) return;
        core_.sender.fill(slot, p, s.data + s.done, n);
        auto h = header(FrameKind::Data, s.number);
        h.aux = s.done;
        h.length = n;
        core_.sender.commit(slot, h);
        s.done += n;
        FT_POINT("p2p.data.send");
    }
}

void PointToPoint::sweep() {
    for (auto it = sends_.begin(); it != sends_.end();) {
        if (it->open && it->done == it->bytes) {
            core_.finish(it->request, {});
            it = sends_.erase(it);
        } else {
            ++it;
        }
    }
}

void PointToPoint::on_writable(int slot) {
    // First the small ones, in order; what is large and under way may have much to send.
    int rank = -1;
    for (auto it = sends_.begin(); it != sends_.end();) {
        const bool here = slot_of(it->dst) == slot;
        if (here && it->small && !it->unsent) pump(*it);
        const bool unsent = here && it->unsent;
        if (unsent && rank < 0) stuck_.remove(rank = it->dst);
        it = unsent && begin(*it) ? sends_.erase(it) : std::next(it);
    }
    for (auto& s : sends_)
        if (!s.small && slot_of(s.dst) == slot) pump(s);
    sweep();
    core_.has_work |=
        std::any_of(recvs_.begin(), recvs_.end(), [&](const Recv& r) { return can_read(r) && slot_of(r.matched) == slot; });
}

void PointToPoint::on_tick(Time now) {
    drain_late(now);
    for (auto it = sends_.begin(); it != sends_.end();) {
        if (is_late(*it, now)) {
            if (it->ticket != nullptr) {
                it->ticket.reset();
                ++it;
                continue;
            }
            const char* what =
                it->unsent ? " has not taken what was sent to it before a message of " : " has posted no receive for ";
            auto s = it->cancelled ? Status::error(Code::Cancelled, "the send was cancelled")
                                   : Status::error(Code::Timeout, "Timed out: rank " + std::to_string(it->dst) + what +
                                                                      std::to_string(it->bytes) +
                                                                      " bytes. Look what it is doing, or raise the timeout");
            s.ranks = {it->dst};
            s.operation = "send in communicator " + spec_.name;
            if (group_) group_->not_received(s);
            it = end(it, std::move(s));
        } else {
            ++it;
        }
    }
    for (auto it = recvs_.begin(); it != recvs_.end();) {
        if (it->deadline > 0 && now > it->deadline && it->matched < 0) {
            auto s = no_message(it->src, it->tag);
            s.operation = "recv in communicator " + spec_.name;
            core_.finish(it->request, std::move(s));
            it = recvs_.erase(it);
        } else {
            ++it;
        }
    }
}

bool PointToPoint::has_small_sends() const {
    return std::any_of(sends_.begin(), sends_.end(), [](const Send& s) { return s.small; });
}

bool PointToPoint::cancel(const RequestPtr& request) {
    for (auto it = recvs_.begin(); it != recvs_.end(); ++it) {
        if (it->request != request || it->matched >= 0) continue;
        core_.finish(request, Status::error(Code::Cancelled, "the receive was cancelled"));
        recvs_.erase(it);
        return true;
    }
    for (auto& s : sends_) {
        if (s.request != request || s.open || s.is_read) continue;
        s.cancelled = true;  // as one whose time is over: first nobody may begin to read it, and then it ends
        return true;
    }
    return false;
}

}  // namespace ftcomm
