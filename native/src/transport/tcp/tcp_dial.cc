// Making connections: rounds over a peer's addresses, repeated with a growing pause.
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/tcp/tcp_impl.h"

namespace ftcomm {

using namespace tcp;

void TcpImpl::schedule_dial(const LinkPtr& link, Time delay) {
    if (link->detached || link->dialing || link->addresses.empty()) return;
    loop_.cancel(link->dial_timer);
    // Always by a timer: dialing may call up, the caller may be inside the node.
    link->dial_timer = loop_.at(IoLoop::now() + delay, guarded([this, link] {
                                    link->dial_timer = 0;
                                    begin_dial(link);
                                }));
}

void TcpImpl::begin_dial(const LinkPtr& link) {
    if (link->detached || link->dialing) return;
    if (link->current != nullptr && IoLoop::now() - std::max(link->last_heard, silence_from_) < fraction(2)) return;
    link->order.clear();
    // Loopback is another machine's own, unless it is this machine or there is nothing else (tests of many hosts on one).
    const bool others =
        std::any_of(link->addresses.begin(), link->addresses.end(), [](const Address& a) { return !a.is_loopback(); });
    if (link->last_good < link->addresses.size()) link->order.push_back(link->last_good);
    for (std::size_t i = 0; i < link->addresses.size(); ++i) {
        if (i == link->last_good) continue;
        if (link->addresses[i].is_loopback() && others && link->host != config_.host) continue;
        link->order.push_back(i);
    }
    link->dialing = true;
    link->next = 0;
    link->refused = 0;
    link->last_good_refused = false;
    dial_next(link);
}

void TcpImpl::dial_next(const LinkPtr& link) {
    loop_.cancel(link->dial_timer);
    link->dial_timer = 0;
    if (!link->dialing || link->next >= link->order.size()) return;
    const auto index = link->order[link->next++];
    const auto& address = link->addresses[index];
    const int fd = ::socket(address.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        link->why = std::string("no socket: ") + std::strerror(errno);
        if (link->next < link->order.size()) return dial_next(link);
        if (link->dials.empty()) round_failed(link);
        return;
    }
    const auto c = std::make_shared<Connection>(fd, loop_, fds_);
    c->dialed = c->connecting = true;
    c->link = link;
    c->address_index = index;
    c->remote = address;
    link->dials.push_back(c);
    // Kernel buffers are left to their automatic sizes: a fixed size would cap them lower than those grow.
    sockaddr_storage to;
    const auto length = address.to_sockaddr(&to);
    if (::connect(fd, reinterpret_cast<sockaddr*>(&to), length) != 0 && errno != EINPROGRESS) {
        c->fail_with(errno);
        return dial_ended(c, std::strerror(errno));
    }
    if (auto s = c->watch(guarded([this, c](std::uint32_t e) { on_event(c, e); }), EPOLLOUT); !s.ok()) {
        return dial_ended(c, s.message);
    }
    c->deadline =
        loop_.at(IoLoop::now() + config_.heartbeat, guarded([this, c] { dial_ended(c, "no answer within a heartbeat"); }));
    if (link->next < link->order.size()) {
        link->dial_timer = loop_.at(IoLoop::now() + fraction(20), guarded([this, link] { dial_next(link); }));
    }
}

void TcpImpl::on_dial(const ConnectionPtr& c, std::uint32_t events) {
    const auto link = c->link;
    if (c->connecting) {
        int error = 0;
        socklen_t length = sizeof error;
        ::getsockopt(c->fd(), SOL_SOCKET, SO_ERROR, &error, &length);
        if (error != 0) {
            c->fail_with(error);
            return dial_ended(c, std::strerror(error));
        }
        c->connecting = false;
        const int one = 1;
        ::setsockopt(c->fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        c->handshake.emplace(Handshake::dialer(identity(), key_, random_bytes(),
                                               {static_cast<std::uint32_t>(link->slot), link->incarnation, link->process}));
        c->want_write(false);
    }
    std::string why;
    if (!advance_handshake(c, events, &why)) {
        if (c->handshake->reason() == Reject::Superseded) {
            link->generation = std::max(link->generation, c->handshake->generation());
        }
        return dial_ended(c, why);
    }
    if (c->handshake->state() == Handshake::State::Confirm) {
        // The first address that answers properly wins the round.
        c->confirmed = true;
        cancel_dials(link, false);
        c->generation = link->generation + 1;
        c->handshake->confirm(c->generation, link->session.received());
        if (!advance_handshake(c, events, &why)) return dial_ended(c, why);
    }
    if (c->handshake->state() != Handshake::State::Done) return;
    // Meanwhile a connection from the peer may have come: the higher number wins, then the lower slot's.
    const auto& current = link->current;
    if (link->generation > c->generation ||
        (link->generation == c->generation && current != nullptr && !current->dialed && link->slot < config_.slot)) {
        return dial_ended(c, "the peer's own connection came first");
    }
    link->generation = c->generation;
    link->last_good = c->address_index;
    const auto received = c->handshake->peer_received();
    std::erase(link->dials, c);
    link->dialing = false;
    install(c, link, received);
}

void TcpImpl::dial_ended(const ConnectionPtr& c, const std::string& why) {
    const auto link = c->link;
    if (link == nullptr) return;
    loop_.cancel(c->deadline);
    c->close();
    c->link.reset();
    std::erase(link->dials, c);
    if (c->error() == ECONNREFUSED) {
        ++link->refused;
        if (c->address_index == link->last_good) link->last_good_refused = true;
    }
    if (link->current == nullptr) link->why = c->remote.text() + ": " + why;
    if (!link->dialing) return;
    if (link->next < link->order.size()) return dial_next(link);
    if (link->dials.empty()) round_failed(link);
}

void TcpImpl::cancel_dials(const LinkPtr& link, bool confirmed_too) {
    const auto dials = link->dials;
    for (const auto& c : dials) {
        if (c->confirmed && !confirmed_too) continue;  // the peer may already have taken it: its end will tell
        loop_.cancel(c->deadline);
        c->close();
        c->link.reset();
        std::erase(link->dials, c);
    }
    loop_.cancel(link->dial_timer);
    link->dial_timer = 0;
    link->next = link->order.size();
    if (link->dials.empty()) link->dialing = false;
}

void TcpImpl::round_failed(const LinkPtr& link) {
    link->dialing = false;
    loop_.cancel(link->dial_timer);
    link->dial_timer = 0;
    if (link->current != nullptr || link->detached) return;
    link->backoff = link->backoff == 0 ? fraction(40) : std::min(2 * link->backoff, fraction(2));
    schedule_dial(link, link->backoff);
    // Nobody listens where the peer was: a reason to propose at once, though a firewall does the same (M6).
    if (!link->last_good_refused && link->refused != link->order.size()) {
        link->refusals = 0;
        return;
    }
    if (++link->refusals == 1) {
        log("rank " + std::to_string(link->slot) + "." + std::to_string(link->incarnation) + " refuses: " + link->why);
        check_idle();  // it is not waited for any more
    }
    // The others, if they are there, say so now: whoever misses many waits longer (M11).
    for (const auto& slot : links_)
        for (const auto& [incarnation, other] : slot) ask(other);
    // After each round: a rank that did not run for a while forgets its complaints (M11), and this one may still hold.
    events_.on_suspicion(link->slot, link->incarnation, Evidence::Reset);
}

}  // namespace ftcomm
