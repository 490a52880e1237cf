// Established connections: frames in and out, and what happens when one ends.
#include <netinet/tcp.h>

#include <cstring>

#include "base/failpoint.h"
#include "transport/tcp/tcp_impl.h"

namespace ftcomm {

using namespace tcp;

namespace {

constexpr int kReadsPerEvent = 8;  // then other descriptors get their turn
constexpr int kReadsPerDrain =
    256;  // of up to 512 KiB, or a frame that has a place: more than a socket holds; a peer that still sends is not listened to for ever
constexpr int kParts = 16;
constexpr std::uint32_t kWorthPlacing = 32u << 10;
constexpr const char* kPlaceGone = "what a frame was for is over, of which a part has arrived";

// A whole data frame at the front of `data`: its size, else 0. Only for fault injection, which runs before the checks.
std::size_t whole_frame(ByteView data) {
    WireHeader header;
    if (data.size() < sizeof header) return 0;
    std::memcpy(&header, data.data(), sizeof header);
    if (header.seq == 0 || header.frame.length > kMaxFramePayload) return 0;
    const auto size = wire_size(header.frame.length);
    return data.size() >= size ? size : 0;
}

std::string ended(const Connection& c) {
    return c.error() == 0 ? "the peer closed the connection" : std::string("connection lost: ") + std::strerror(c.error());
}

// Loopback has no congestion; pacing (BBR's) only takes time there: a tenth of a large all-reduce. Where it can't be had, it stays.
void dont_pace(const Connection& c) {
    constexpr char kCubic[] = "cubic";
    if (c.remote.is_loopback()) ::setsockopt(c.fd(), IPPROTO_TCP, TCP_CONGESTION, kCubic, sizeof kCubic - 1);
}

}  // namespace

bool TcpImpl::advance_handshake(const ConnectionPtr& c, std::uint32_t events, std::string* why) {
    auto& h = *c->handshake;
    bool end = false;
    while ((events & ~std::uint32_t{EPOLLOUT}) != 0 && h.state() == Handshake::State::Waiting) {
        if (c->data().empty()) {
            c->make_room(1);
            const auto r = c->read_some();
            if (r == IoResult::Again) break;
            if (r == IoResult::End) {
                end = true;
                break;
            }
        }
        c->consume(h.feed(c->data()));
    }
    c->queue(h.take_output());
    const auto written = c->write_pending();
    if (h.state() == Handshake::State::Failed) {
        *why = (h.rejected_by_peer() ? "refused by the peer: " : "") + h.text();
        return false;
    }
    if (end || written == IoResult::End) {
        *why = ended(*c);
        return false;
    }
    c->want_write(c->has_pending());
    return true;
}

void TcpImpl::install(const ConnectionPtr& c, const LinkPtr& link, std::uint64_t peer_received) {
    loop_.cancel(c->deadline);
    c->deadline = 0;
    c->handshake.reset();
    c->link = link;
    c->make_room(0);
    dont_pace(*c);
    const auto old = link->current;
    link->current = nullptr;
    if (old != nullptr) {
        old->close();
        old->link.reset();
    }
    link->session.disconnected();
    if (!link->session.connected(peer_received)) {
        // Can only be another process, or memory that was overwritten: nothing may be sent into that.
        c->close();
        c->link.reset();
        link->why = "the peer claims to have received what was never sent";
        log("rank " + std::to_string(link->slot) + ": " + link->why);
        schedule_dial(link, fraction(2));
        return;
    }
    link->current = c;
    link->why.clear();
    link->last_heard = link->last_sent = IoLoop::now();
    link->refusals = 0;
    cancel_dials(link, false);
    log("rank " + std::to_string(link->slot) + "." + std::to_string(link->incarnation) + " connected (" +
        std::to_string(c->generation) + ", " + (c->dialed ? "dialed " : "accepted from ") + c->remote.text() + ")");
    if (!link->linked) {
        link->linked = true;
        events_.on_linked(link->slot, link->incarnation);
    }
    if (link->current == c) events_.on_heard(link->slot, link->incarnation);
    // The acceptor may have sent frames right behind its last handshake message.
    if (link->current == c) take_frames(c);
}

void TcpImpl::on_established(const ConnectionPtr& c, std::uint32_t events) {
    const auto link = c->link;
    if ((events & ~std::uint32_t{EPOLLOUT}) == 0) return flush(link);
    bool heard = false;
    for (int i = 0; i < kReadsPerEvent; ++i) {
        if (!is_in_place(*link, *c)) return broken(link, kPlaceGone);
        const auto r = c->read_some();
        if (r == IoResult::Again) break;
        if (r == IoResult::End) return broken(link, ended(*c));
        link->last_heard = IoLoop::now();
        link->backoff = 0;
        link->refusals = 0;
        if (!heard) events_.on_heard(link->slot, link->incarnation);
        heard = true;
        if (link->current != c || !take_frames(c)) return;
    }
    flush(link);
}

// Frames that are whole: up they go. `why`: what is wrong with the next one.
TcpImpl::Taken TcpImpl::take_arrived(const ConnectionPtr& c, const char** why) {
    const auto link = c->link;
    auto& session = link->session;
    for (;;) {
        if (!is_in_place(*link, *c)) {
            *why = kPlaceGone;
            return Taken::Broken;
        }
        if (fault::armed.load(std::memory_order_relaxed)) {
            if (!c->placed().empty() || (c->place() == nullptr && whole_frame(c->data()) != 0)) {
                const auto verdict = FT_POINT("tcp.receive");
                if (verdict.action == fault::Action::Corrupt) {
                    auto* last = c->place() != nullptr ? c->place() + c->placed().size() - 1
                                                       : c->mutable_data() + whole_frame(c->data()) - 1;
                    *last ^= std::byte{1};
                }
                if (verdict.action == fault::Action::Cut) cut(verdict.argument);
            }
        }
        if (c->place() != nullptr && c->placed().empty()) return Taken::All;
        const auto step = session.parse(c->data(), c->placed());
        if (step.kind == Session::Step::Kind::More) {
            if (step.is_next && find_place(*link, *c, step.header)) continue;
            c->make_room(step.needed);
            return Taken::All;
        }
        if (step.kind == Session::Step::Kind::Broken) {
            *why = step.reason;
            return Taken::Broken;
        }
        if (step.kind == Session::Step::Kind::Frame) {
            link->delivering = true;
            events_.on_frame(link->slot, link->incarnation, step.header, step.payload);
            link->delivering = false;
            if (link->current != c) return Taken::Detached;  // by what it called
        }
        c->unplace();
        c->consume(step.consumed);
    }
}

// A long payload that is still to come need not come by the buffer.
bool TcpImpl::find_place(const Link& link, Connection& c, const FrameHeader& header) {
    if (header.length < kWorthPlacing || header.length % Transport::kWholeBytes != 0) return false;
    auto* to = events_.place(link.slot, link.incarnation, header);
    if (to == nullptr) return false;
    c.place(sizeof(WireHeader), header, to);
    c.make_room(2 * sizeof(WireHeader));
    return true;
}

// Asked before anything is written there, or read: whatever came between may have given the memory to somebody else, so that what has come of the
// frame cannot even be taken back. It is sent again; one that was removed meanwhile is not heard further (as if it had died a little earlier).
bool TcpImpl::is_in_place(const Link& link, const Connection& c) {
    return c.place() == nullptr || events_.place(link.slot, link.incarnation, c.placed_header()) == c.place();
}

// What the kernel holds of a peer that is gone, or goes. Called from inside the node: nothing else may go up, and what is wrong with
// the connection is left to the loop.
void TcpImpl::drain(const LinkPtr& link) {
    if (link == nullptr || link->current == nullptr || link->delivering)
        return;  // a frame of it is being delivered: the rest follows
    const auto c = link->current;
    const char* why = nullptr;
    for (int i = 0; i < kReadsPerDrain; ++i)
        if (take_arrived(c, &why) != Taken::All || c->read_some() != IoResult::Ok) return;
}

// True: `c` is still the link's connection, and has room to read into.
bool TcpImpl::take_frames(const ConnectionPtr& c) {
    const auto link = c->link;
    auto& session = link->session;
    const char* why = nullptr;
    switch (take_arrived(c, &why)) {
        case Taken::All: break;
        case Taken::Broken: broken(link, why); return false;
        case Taken::Detached: return false;
    }
    if (session.take_writable() && attached_[static_cast<std::size_t>(link->slot)] == link->incarnation) {
        events_.on_writable(link->slot);
    }
    if (session.all_acknowledged()) check_idle();
    if (link->current != c) return false;
    flush(link);
    return true;
}

// Once per time that there was something to wait for.
void TcpImpl::check_idle() {
    if (was_idle_ || !all_acknowledged()) return;
    was_idle_ = true;
    events_.on_idle();
}

void TcpImpl::flush(const LinkPtr& link) {
    const auto c = link->current;
    if (c == nullptr) return;
    auto result = c->write_pending();
    while (result == IoResult::Ok && link->session.wants_write()) {
        iovec parts[kParts];
        std::size_t written;
        result = c->write(parts, link->session.gather(parts, kParts), &written);
        if (result == IoResult::Ok) {
            link->session.wrote(written);
            link->last_sent = IoLoop::now();
        }
    }
    // The loop then sees the end and handles it on its own thread; a caller deep in the node may not be called back.
    if (result == IoResult::End) c->break_off();
    c->want_write(result == IoResult::Again);
}

void TcpImpl::ask(const LinkPtr& link) {
    if (link->current == nullptr) return;
    link->session.want_ack(true);
    flush(link);
}

void TcpImpl::broken(const LinkPtr& link, const std::string& why) {
    const auto c = link->current;
    if (c == nullptr) return;
    link->current = nullptr;
    c->close();
    c->link.reset();
    link->session.disconnected();
    link->why = why;
    log("rank " + std::to_string(link->slot) + "." + std::to_string(link->incarnation) + ": " + why + "; reconnecting");
    schedule_dial(link, link->backoff);
    link->backoff = link->backoff == 0 ? fraction(80) : std::min(2 * link->backoff, fraction(2));
    check_idle();  // one that is not attached is not waited for
}

}  // namespace ftcomm
