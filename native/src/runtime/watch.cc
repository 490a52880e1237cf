#include "runtime/watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/liveness.h"
#include "transport/shm/mailbox.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace ftcomm {

Watch::Watch(shm::Segment& segment, shm::Instance& self, IoLoop& loop, WatchEvents& events)
    : segment_(segment), self_(self), loop_(loop), events_(events), newest_(static_cast<std::size_t>(segment.world_size())) {}

void Watch::look_for_peers() {
    for (int slot = 0; slot < segment_.world_size(); ++slot) {
        auto& known = newest_[static_cast<std::size_t>(slot)];
        auto newest = segment_.newest(slot).load(std::memory_order_acquire);
        if (newest == known) continue;
        for (auto* i = segment_.newest_instance(slot); i != nullptr && segment_.offset_of(i) != known;
             i = segment_.older_instance(i))
            if (i != &self_) add(slot, i);
        known = newest;
    }
}

void Watch::add(int slot, shm::Instance* instance) {
    Peer peer{slot, instance->incarnation, instance};
    if (self_.pid_namespace != 0 && instance->pid_namespace == self_.pid_namespace) {
        peer.pidfd = static_cast<int>(::syscall(SYS_pidfd_open, instance->pid, 0));
        // Still held: its thread lives, so the process id has not gone to somebody else in between.
        if (peer.pidfd >= 0 && !is_held(instance->liveness.load(std::memory_order_seq_cst))) {
            ::close(peer.pidfd);
            peer.pidfd = -1;
        }
    }
    auto distance = [&](const Peer& p) {
        return (p.slot - static_cast<int>(self_.slot) + segment_.world_size()) % segment_.world_size();
    };
    auto at = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& p) { return distance(p) > distance(peer); });
    peers_.insert(at, peer);
    if (peer.pidfd < 0) return;
    auto status = loop_.add(peer.pidfd, EPOLLIN, [this, fd = peer.pidfd](std::uint32_t) {
        auto it = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& p) { return p.pidfd == fd; });
        if (it == peers_.end()) return;
        auto word = it->instance->liveness.load(std::memory_order_acquire);
        gone(*it, word == kClosed ? Evidence::Left : word == kLeft ? Evidence::None : Evidence::Pidfd);
    });
    if (status) return;
    auto it = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& p) { return p.instance == instance; });
    ::close(it->pidfd);
    it->pidfd = -1;
}

void Watch::check_liveness() {
    // By index: on_gone runs the protocol, which may do anything but add peers.
    for (std::size_t i = 0; i < peers_.size(); ++i) {
        auto& peer = peers_[i];
        if (peer.gone) continue;
        auto word = peer.instance->liveness.load(std::memory_order_acquire);
        if (is_dead(word)) {
            announce(peer, word);
            gone(peer, Evidence::RobustFutex);
        } else if (word == kClosed) {
            gone(peer, Evidence::Left);
        } else if (word == kLeft) {
            gone(peer, Evidence::None);
        }
    }
}

// The kernel wakes one waiter of the dead thread's word, and not every rank waits on every word: the first to see it rings
// everybody.
void Watch::announce(Peer& peer, std::uint32_t word) {
    if ((word & kAnnounced) != 0) return;
    if (!peer.instance->liveness.compare_exchange_strong(word, word | kAnnounced, std::memory_order_acq_rel)) return;
    futex_wake(peer.instance->liveness, INT32_MAX);
    for (const auto& other : peers_)
        if (!other.gone && &other != &peer) shm::ring_progress(other.instance->mailbox);
}

void Watch::gone(Peer& peer, Evidence evidence) {
    if (peer.pidfd >= 0) {
        loop_.remove(peer.pidfd);
        ::close(peer.pidfd);
        peer.pidfd = -1;
    }
    if (peer.gone) return;
    peer.gone = true;
    if (evidence != Evidence::None) events_.on_gone(peer.slot, peer.incarnation, evidence);
}

void Watch::check_ticks() {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
        auto& peer = peers_[i];
        auto ticks = peer.instance->ticks.load(std::memory_order_relaxed);
        if (peer.gone || ticks == peer.ticks) continue;
        peer.ticks = ticks;
        events_.on_ticked(peer.slot, peer.incarnation);
    }
}

bool Watch::words(std::vector<FutexWord>* out) const {
    for (const auto& peer : peers_) {
        if (peer.gone) continue;
        auto word = peer.instance->liveness.load(std::memory_order_acquire);
        if (!is_held(word)) return false;
        if (out->size() < kMaxFutexWords) out->push_back({&peer.instance->liveness, word});
    }
    return true;
}

void Watch::close() {
    for (auto& peer : peers_) {
        if (peer.pidfd < 0) continue;
        loop_.remove(peer.pidfd);
        ::close(peer.pidfd);
        peer.pidfd = -1;
    }
}

void Watch::close_in_child() {
    for (auto& peer : peers_)
        if (peer.pidfd >= 0) ::close(peer.pidfd);
}

}  // namespace ftcomm
