// Incoming connections, from the first byte of a stranger to an authenticated peer.
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/tcp/tcp_impl.h"

namespace ftcomm {

using namespace tcp;

void TcpImpl::watch_listener(int fd) {
    if (auto s = loop_.add(fd, EPOLLIN, guarded([this, fd](std::uint32_t) { on_acceptable(fd); })); !s.ok()) { log(s.message); }
}

void TcpImpl::on_acceptable(int fd) {
    sockaddr_storage from;
    socklen_t length = sizeof from;
    const int accepted = ::accept4(fd, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (accepted < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            // The listener stays readable: without a pause the loop would spin until somebody closes a descriptor.
            log(std::string("can't accept: ") + std::strerror(errno));
            loop_.remove(fd);
            loop_.at(IoLoop::now() + fraction(4), guarded([this, fd] { watch_listener(fd); }));
        }
        return;
    }
    const auto c = std::make_shared<Connection>(accepted, loop_, fds_);
    Address::from_sockaddr(reinterpret_cast<sockaddr*>(&from), &c->remote);
    if (!config_.has_secret && !c->remote.is_loopback()) return;
    const int one = 1;
    ::setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    // A flood of strangers costs the oldest stranger its place; a rank that is pushed out dials again.
    if (pending_.size() >= 32 + 2 * static_cast<std::size_t>(config_.world_size)) {
        drop_pending(pending_.front(), "too many connections that do not say who they are");
    }
    c->handshake.emplace(Handshake::acceptor(identity(), key_, random_bytes()));
    if (auto s = c->watch(guarded([this, c](std::uint32_t e) { on_event(c, e); }), EPOLLIN); !s.ok()) return;
    c->deadline = loop_.at(IoLoop::now() + config_.heartbeat,
                           guarded([this, c] { drop_pending(c, "it did not say who it is within a heartbeat"); }));
    pending_.push_back(c);
}

void TcpImpl::drop_pending(const ConnectionPtr& c, const std::string& why) {
    const auto it = std::find(pending_.begin(), pending_.end(), c);
    if (it == pending_.end()) return;
    const auto keep = c;
    pending_.erase(it);
    loop_.cancel(keep->deadline);
    log("connection from " + keep->remote.text() + " dropped: " + why);
    keep->close();
}

void TcpImpl::on_pending(const ConnectionPtr& c, std::uint32_t events) {
    std::string why;
    if (!advance_handshake(c, events, &why)) return drop_pending(c, why);
    if (c->handshake->state() == Handshake::State::Confirm) decide(c);
}

// The peer has proved who it is: is it wanted, and is this its newest connection?
void TcpImpl::decide(const ConnectionPtr& c) {
    auto& h = *c->handshake;
    const auto id = h.peer();
    const auto slot = static_cast<std::size_t>(id.slot);
    const std::int64_t incarnation = id.incarnation;
    const auto refuse = [&](Reject why, const std::string& text, std::uint64_t generation) {
        h.reject(why, text, generation);
        c->queue(h.take_output());
        c->write_pending();
        drop_pending(c, "rank " + std::to_string(slot) + ": " + text);
    };
    auto& known = links_[slot];
    if (incarnation <= refused_[slot] || incarnation < attached_[slot] ||
        (!known.empty() && incarnation < static_cast<std::int64_t>(known.rbegin()->first) && incarnation != attached_[slot])) {
        return refuse(
            Reject::Removed,
            "rank " + std::to_string(slot) + " incarnation " + std::to_string(incarnation) + " is not part of the job any more",
            0);
    }
    const auto link = make_link(static_cast<int>(slot), id.incarnation);
    if (link->process != 0 && link->process != id.process) {
        return refuse(Reject::Stranger,
                      "another process already is rank " + std::to_string(slot) + " incarnation " + std::to_string(incarnation) +
                          ": a restarted one needs the next incarnation",
                      0);
    }
    const bool lower_is_ours = link->current != nullptr && link->current->dialed && config_.slot < link->slot;
    if (h.generation() < link->generation || (h.generation() == link->generation && lower_is_ours)) {
        return refuse(Reject::Superseded, "there is a newer connection", link->generation);
    }
    link->process = id.process;
    link->host = id.host;
    if (AddressBlob blob; link->addresses.empty() && AddressBlob::decode(id.address, &blob).ok()) {
        link->addresses = blob.addresses;
    }
    link->generation = c->generation = h.generation();
    h.confirm(c->generation, link->session.received());
    c->queue(h.take_output());
    const auto peer_received = h.peer_received();
    std::erase(pending_, c);
    install(c, link, peer_received);
}

}  // namespace ftcomm
