// The transport as a whole: start, stop, which incarnation of a slot has a link, and the regular tick.
#include <unistd.h>

#include <algorithm>

#include "base/check.h"
#include "base/random.h"
#include "transport/tcp/tcp_impl.h"

namespace ftcomm {

using namespace tcp;

TcpImpl::TcpImpl(TcpConfig config, IoLoop& loop, TcpEvents& events)
    : config_(std::move(config)),
      loop_(loop),
      events_(events),
      links_(static_cast<std::size_t>(config_.world_size)),
      attached_(static_cast<std::size_t>(config_.world_size), -1),
      refused_(static_cast<std::size_t>(config_.world_size), -1) {
    FT_CHECK(config_.slot >= 0 && config_.slot < config_.world_size, "slot %d of %d", config_.slot, config_.world_size);
    while (process_ == 0) process_ = os_random64();
}

Digest TcpImpl::random_bytes() const {
    Digest out;
    os_random(out.data(), out.size());
    return out;
}

Identity TcpImpl::identity() const {
    Identity id;
    id.job = hash64(std::as_bytes(std::span(config_.job.data(), config_.job.size())));
    id.boot = boot_;
    id.world_size = static_cast<std::uint32_t>(config_.world_size);
    id.slot = static_cast<std::uint32_t>(config_.slot);
    id.incarnation = config_.incarnation;
    id.host = config_.host;
    id.process = process_;
    id.address = address_;
    return id;
}

Status TcpImpl::listen() {
    FT_CHECK(listeners_.empty(), "listen was called twice");
    if (auto s = open_listeners(config_.interface_, config_.has_secret, &listeners_, &addresses_); !s.ok()) return s;
    for (const int fd : listeners_) fds_.add(fd);
    AddressBlob blob;
    blob.slot = static_cast<std::uint32_t>(config_.slot);
    blob.incarnation = config_.incarnation;
    blob.host = config_.host;
    blob.process = process_;
    blob.addresses = addresses_;
    address_ = blob.encode();
    return {};
}

Status TcpImpl::start(const std::vector<Bytes>& peers, std::uint64_t boot) {
    FT_CHECK(!started_ && !listeners_.empty(), "start comes once, after listen");
    boot_ = boot_tag(config_.job, boot);
    key_ = handshake_key(config_.has_secret ? ByteView(config_.secret) : ByteView(), config_.job, boot);
    if (peers.size() > links_.size()) return Status::error(Code::Invalid, "there are more addresses than ranks");
    for (std::size_t slot = 0; slot < peers.size(); ++slot) {
        if (peers[slot].empty() || static_cast<int>(slot) == config_.slot) continue;
        AddressBlob blob;
        const auto who = "rank " + std::to_string(slot);
        if (auto s = AddressBlob::decode(peers[slot], &blob); !s.ok()) return std::move(s).within(who);
        if (blob.slot != slot) {
            return Status::error(Code::Invalid, who + " published the address of rank " + std::to_string(blob.slot) +
                                                    ": two processes have the same rank");
        }
        const auto link = make_link(static_cast<int>(slot), blob.incarnation);
        link->process = blob.process;
        link->host = blob.host;
        link->addresses = blob.addresses;
        attached_[slot] = blob.incarnation;
        // Mostly one side dials: the lower slot, or the replacement, whose address the others do not know.
        const bool first = config_.slot < link->slot || config_.incarnation > 0;
        schedule_dial(link, first ? 0 : fraction(4));
    }
    started_ = true;
    for (const int fd : listeners_) watch_listener(fd);
    last_tick_ = silence_from_ = IoLoop::now();
    loop_.at(last_tick_ + fraction(8), guarded([this] { tick(); }));
    return {};
}

void TcpImpl::stop() {
    if (stopped_ || forked_) return;
    stopped_ = true;
    alive_.reset();
    for (auto& slot : links_) {
        for (auto& [incarnation, link] : slot) {
            if (const auto c = link->current; c != nullptr) {
                // Unread input would make the kernel answer with a reset, and that destroys what is still on its way out.
                ::shutdown(c->fd(), SHUT_WR);
                std::byte sink[4096];
                while (::recv(c->fd(), sink, sizeof sink, MSG_DONTWAIT) > 0) {}
            }
            drop(link);
        }
        slot.clear();
    }
    for (const auto& c : pending_) {
        loop_.cancel(c->deadline);
        c->close();
    }
    pending_.clear();
    for (const int fd : listeners_) {
        loop_.remove(fd);
        fds_.remove(fd);
        ::close(fd);
    }
    listeners_.clear();
}

LinkPtr TcpImpl::make_link(int slot, std::uint32_t incarnation) {
    auto& known = links_[static_cast<std::size_t>(slot)];
    if (const auto it = known.find(incarnation); it != known.end()) return it->second;
    const auto link = std::make_shared<Link>(slot, incarnation, config_.ring_bytes);
    // At most two per slot: the attached one and the newest.
    for (auto it = known.begin(); it != known.end();) {
        if (it->first < incarnation && it->first != attached_[static_cast<std::size_t>(slot)]) {
            drop(it->second);
            it = known.erase(it);
        } else {
            ++it;
        }
    }
    known.emplace(incarnation, link);
    return link;
}

LinkPtr TcpImpl::current(int slot) const {
    const auto incarnation = attached_[static_cast<std::size_t>(slot)];
    return incarnation < 0 ? nullptr : find(slot, static_cast<std::uint32_t>(incarnation));
}

LinkPtr TcpImpl::find(int slot, std::uint32_t incarnation) const {
    const auto& known = links_[static_cast<std::size_t>(slot)];
    const auto it = known.find(incarnation);
    return it == known.end() ? nullptr : it->second;
}

void TcpImpl::drop(const LinkPtr& link) {
    link->detached = true;
    cancel_dials(link, true);
    if (const auto c = link->current; c != nullptr) {
        link->current = nullptr;
        c->close();
        c->link.reset();
    }
    link->session.disconnected();
}

void TcpImpl::attach(int slot, std::uint32_t incarnation) {
    const auto s = static_cast<std::size_t>(slot);
    if (slot == config_.slot || attached_[s] == incarnation) return;
    // A replacement's address book may be ahead of its view: then the newer link waits for its turn, and is not refused.
    if (attached_[s] > incarnation) attached_[s] = -1;
    if (attached_[s] >= 0) detach(slot);
    const auto link = make_link(slot, incarnation);
    attached_[s] = incarnation;
    if (link->current == nullptr) schedule_dial(link, 0);
    if (waiting_for_attach_.erase(slot) > 0) loop_.post(guarded([this, slot] { events_.on_writable(slot); }));
}

void TcpImpl::detach(int slot) {
    const auto s = static_cast<std::size_t>(slot);
    if (attached_[s] < 0) return;
    const auto link = current(slot);
    refused_[s] = std::max(refused_[s], attached_[s]);
    attached_[s] = -1;
    if (link == nullptr) return;
    links_[s].erase(link->incarnation);
    drop(link);
    // The last unacknowledged frames may have been its own: then this was what a flush waited for.
    if (!was_idle_) loop_.post(guarded([this] { check_idle(); }));
}

void TcpImpl::tick() {
    const Time now = IoLoop::now();
    // A process that did not run has heard nothing because it did not listen (M11).
    if (now - last_tick_ > fraction(4)) silence_from_ = now;
    last_tick_ = now;
    for (auto& slot : links_) {
        for (auto& [incarnation, link] : slot) {
            if (link->current == nullptr) continue;
            if (link->session.owes_ack() || now - link->last_sent >= fraction(8)) {
                link->session.want_ack(false);
                flush(link);
            }
            // A path that has died without a word (a moved address, a forgetful firewall): a second connection may do.
            if (now - std::max(link->last_heard, silence_from_) >= fraction(2)) schedule_dial(link, 0);
        }
    }
    loop_.at(now + fraction(8), guarded([this] { tick(); }));
}

void TcpImpl::cut(int slot) {
    if (slot < 0 || slot >= config_.world_size) return;
    for (auto& [incarnation, link] : links_[static_cast<std::size_t>(slot)]) {
        if (link->current != nullptr) link->current->break_off();
    }
}

// Also while its connection is broken: what was sent last may be a goodbye, and its receiver would take the next refusal for a death. Not a
// peer that nobody answers for any more: most likely it has left, too.
bool TcpImpl::is_awaited(const Link& link) const {
    return link.current != nullptr ||
           (link.linked && link.refusals == 0 &&
            attached_[static_cast<std::size_t>(link.slot)] == static_cast<std::int64_t>(link.incarnation));
}

bool TcpImpl::all_acknowledged() const {
    for (const auto& slot : links_) {
        for (const auto& [incarnation, link] : slot) {
            if (!link->session.all_acknowledged() && is_awaited(*link)) return false;
        }
    }
    return true;
}

void TcpImpl::on_event(const ConnectionPtr& c, std::uint32_t events) {
    if (!c->is_open()) return;
    if (c->link != nullptr && c->link->current == c) return on_established(c, events);
    if (c->dialed) return on_dial(c, events);
    on_pending(c, events);
}

}  // namespace ftcomm
