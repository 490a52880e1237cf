// A large message on one host whose receiver copies it out of its sender's memory.
//
// The announcement brings the place and a ticket (C9). The receiver says that it reads, reads, and says that it has the message: only
// then is the sender's buffer the caller's again. If that is to be so before, for the receiver was voted out, the ticket falls first,
// and what was read under it is worth nothing. A sender whose time is over gives up a tick after its ticket has fallen, when all that
// has arrived says of no reading: whoever began to read in time said so before, and a message that was given up is not received.
//
// A receiver for which a read does not count asks for the message as if it had not been shown: a sender that is still there sends it,
// one that has given up says so, and the death of one that is gone will be told.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"
#include "communicator/p2p.h"

namespace ftcomm {

bool PointToPoint::show(Send& s, const FrameHeader& h) {
    if (!core_.shows(s.bytes) || !core_.transport.shares_memory(slot_of(s.dst))) return false;
    auto ticket = std::make_unique<ReadTicket>(core_.tickets, core_.fresh_ticket());
    if (!ticket->issue()) return false;
    const Transport::Remote remote{reinterpret_cast<std::uintptr_t>(s.data), ticket->place(), ticket->number()};
    s.ticket = std::move(ticket);
    s.shown = true;
    core_.sender.send(slot_of(s.dst), h, std::as_bytes(std::span(&remote, 1)));
    return true;
}

// The ticket falls before the caller is told that the buffer is its own.
PointToPoint::Sends::iterator PointToPoint::end(Sends::iterator it, Status status) {
    it->ticket.reset();
    core_.finish(it->request, std::move(status));
    if (it->unsent) {
        it->unsent = false;
        const int dst = it->dst;
        if (std::none_of(sends_.begin(), sends_.end(), [&](const Send& s) { return s.unsent && s.dst == dst; }))
            stuck_.remove(dst);
    }
    return sends_.erase(it);
}

Transport::Remote PointToPoint::shown_by(ByteView payload) {
    Transport::Remote remote;
    FT_CHECK(payload.empty() || payload.size() == sizeof remote, "an announcement of %zu bytes", payload.size());
    if (!payload.empty()) std::memcpy(&remote, payload.data(), sizeof remote);
    return remote;
}

bool PointToPoint::work() {
    const auto readable = [this](const Recv& r) { return can_read(r); };
    const auto it = std::find_if(recvs_.begin(), recvs_.end(), readable);
    if (it == recvs_.end()) return false;
    if (read(*it)) recvs_.erase(it);
    return std::any_of(recvs_.begin(), recvs_.end(), readable);
}

// Not before the sender can see that it is read.
bool PointToPoint::can_read(const Recv& r) const { return r.shown.ticket != 0 && core_.sender.clear(slot_of(r.matched)); }

bool PointToPoint::is_late(const Send& s, Time now) const {
    return (s.cancelled || (s.deadline > 0 && now > s.deadline)) && !s.open && !s.is_read;
}

void PointToPoint::drain_late(Time now) {
    RankSet late;
    for (const auto& s : sends_)
        if (is_late(s, now) && s.shown && s.ticket == nullptr) late.add(s.dst);
    for (int r : late.list()) core_.transport.drain(slot_of(r));
}

void PointToPoint::halt() {
    sends_.clear();
    stuck_ = {};
    recvs_.clear();
}

bool PointToPoint::read(Recv& r) {
    const auto n = std::min(r.bytes - r.done, core_.config.read_bytes);
    auto remote = r.shown;
    remote.from += r.done;
    if (read_shown(core_.transport, core_.rules, slot_of(r.matched), remote, r.data + r.done, n) != Transport::Read::Done) {
        core_.host.trace("p2p.read.over");
        r.shown = {};
        r.done = 0;
        answer(r.matched, r.number, kSendIt);
        return false;
    }
    r.done += n;
    FT_POINT("p2p.read");
    if (r.done < r.bytes) {
        core_.has_work = true;
        return false;
    }
    answer(r.matched, r.number, kReceived);
    FT_POINT("p2p.received");
    core_.finish(r.request, {});
    return true;
}

}  // namespace ftcomm
