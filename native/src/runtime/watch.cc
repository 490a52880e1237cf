#include "runtime/watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "runtime/liveness.h"
#include "transport/shm/mailbox.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace ftcomm {

Watch::Watch(shm::Segment& segment, shm::Instance& self, IoLoop& loop, WatchEvents& events)
    : segment_(segment), self_(self), loop_(loop), events_(events), newest_(static_cast<std::size_t>(segment.world_size())) {}

void Watch::look_for_peers() {
    bool came = false;
    for (int slot = 0; slot < segment_.world_size(); ++slot) {
        auto& known = newest_[static_cast<std::size_t>(slot)];
        auto newest = segment_.newest(slot).load(std::memory_order_acquire);
        if (newest == known) continue;
        for (auto* i = segment_.newest_instance(slot); i != nullptr && segment_.offset_of(i) != known;
             i = segment_.older_instance(i))
            if (i != &self_) add(slot, i);
        known = newest;
        came = true;
    }
    if (came) watch_nearest();
}

void Watch::add(int slot, shm::Instance* instance) {
    Peer peer{slot, instance->incarnation, instance};
    peer.no_pidfd = self_.pid_namespace == 0 || instance->pid_namespace != self_.pid_namespace;
    auto distance = [&](const Peer& p) {
        return (p.slot - static_cast<int>(self_.slot) + segment_.world_size()) % segment_.world_size();
    };
    auto at = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& p) { return distance(p) > distance(peer); });
    peers_.insert(at, peer);
}

void Watch::watch_nearest() {
    int living = 0;
    // By index: gone() runs the protocol, which may do anything but add peers.
    for (std::size_t i = 0; i < peers_.size(); ++i) {
        auto& peer = peers_[i];
        if (peer.gone || ++living > kWatchedPeers) close_pidfd(peer);
        else if (peer.pidfd < 0 && !peer.no_pidfd && !open_pidfd(peer)) {
            peer.no_pidfd = true;  // once is enough
            if (errno == ESRCH) ended(peer);  // nobody has its number: it is proof, where the kernel does not mark words
        }
    }
}

// False: there is none, for errno's reason.
bool Watch::open_pidfd(Peer& peer) {
    peer.pidfd = static_cast<int>(::syscall(SYS_pidfd_open, peer.instance->pid, 0));
    if (peer.pidfd < 0) return false;
    // Still held: its thread lives, so the process id has not gone to somebody else in between.
    auto status = Status::error(Code::System, "");
    if (is_held(peer.instance->liveness.load(std::memory_order_seq_cst)))
        status = loop_.add(peer.pidfd, EPOLLIN, [this, fd = peer.pidfd](std::uint32_t) {
            auto it = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& p) { return p.pidfd == fd; });
            if (it != peers_.end()) ended(*it);
        });
    if (status) return true;
    ::close(std::exchange(peer.pidfd, -1));
    errno = 0;
    return false;
}

void Watch::close_pidfd(Peer& peer) {
    if (peer.pidfd < 0) return;
    loop_.remove(peer.pidfd);
    ::close(std::exchange(peer.pidfd, -1));
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

// Its process has.
void Watch::ended(Peer& peer) {
    const auto word = peer.instance->liveness.load(std::memory_order_acquire);
    gone(peer, word == kClosed ? Evidence::Left : word == kLeft ? Evidence::None : Evidence::Pidfd);
}

void Watch::gone(Peer& peer, Evidence evidence) {
    close_pidfd(peer);
    if (peer.gone) return;
    peer.gone = true;
    if (evidence != Evidence::None) events_.on_gone(peer.slot, peer.incarnation, evidence);
    watch_nearest();
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
    int living = 0;
    for (const auto& peer : peers_) {
        if (peer.gone) continue;
        if (++living > kWatchedPeers) break;
        auto word = peer.instance->liveness.load(std::memory_order_acquire);
        if (!is_held(word)) return false;
        out->push_back({&peer.instance->liveness, word});
    }
    return true;
}

void Watch::close() {
    for (auto& peer : peers_) close_pidfd(peer);
}

void Watch::close_in_child() {
    for (auto& peer : peers_)
        if (peer.pidfd >= 0) ::close(peer.pidfd);
}

}  // namespace ftcomm
