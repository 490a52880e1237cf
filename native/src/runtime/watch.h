// Who of this host is alive: liveness words, tick counters and pidfds of all incarnations that have registered.
#pragma once

#include <vector>

#include "base/status.h"
#include "runtime/io_loop.h"
#include "transport/shm/futex.h"
#include "transport/shm/segment.h"

namespace ftcomm {

class WatchEvents {
public:
    virtual ~WatchEvents() = default;
    virtual void on_gone(int slot, std::uint32_t incarnation, Evidence evidence) = 0;  // once per incarnation
    virtual void on_ticked(int slot, std::uint32_t incarnation) = 0;
};

// Each rank has a descriptor of, and sleeps on the words of, this many of its host's living others: those next to it. Whoever of them sees
// a death rings everybody, so it is seen if only one of them can. More would be work for each sleep.
inline constexpr int kWatchedPeers = 16;
static_assert(kWatchedPeers < static_cast<int>(kMaxFutexWords));  // and the own bell

// All calls with the engine locked.
class Watch {
public:
    // pid_namespace 0: no pidfds.
    Watch(shm::Segment& segment, shm::Instance& self, IoLoop& loop, WatchEvents& events);
    ~Watch() { close(); }

    void look_for_peers();      // new incarnations
    void check_liveness();      // deaths, exits; tells everybody on the host
    void check_ticks();
    // What to sleep on besides the own bell: the words of the next living ones. Between a rank and the nearest living one before it all are
    // dead, so that one watches it, and has been rung for each of those. False: something has happened to one of them: check_liveness() first.
    bool words(std::vector<FutexWord>* out) const;
    void close();
    void close_in_child();

private:
    struct Peer {
        int slot;
        std::uint32_t incarnation;
        shm::Instance* instance;
        std::uint64_t ticks = 0;
        int pidfd = -1;
        bool gone = false, no_pidfd = false;
    };
    void add(int slot, shm::Instance* instance);
    void watch_nearest();
    bool open_pidfd(Peer& peer);
    void close_pidfd(Peer& peer);
    void ended(Peer& peer);
    void gone(Peer& peer, Evidence evidence);
    void announce(Peer& peer, std::uint32_t word);

    shm::Segment& segment_;
    shm::Instance& self_;
    IoLoop& loop_;
    WatchEvents& events_;
    std::vector<std::uint64_t> newest_;   // per slot: offset last seen
    std::vector<Peer> peers_;             // in order of (slot - own slot) mod world size, then of age
};

}  // namespace ftcomm
