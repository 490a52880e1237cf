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

// All calls with the engine locked.
class Watch {
public:
    // pid_namespace 0: no pidfds.
    Watch(shm::Segment& segment, shm::Instance& self, IoLoop& loop, WatchEvents& events);
    ~Watch() { close(); }

    void look_for_peers();      // new incarnations
    void check_liveness();      // deaths, exits; tells everybody on the host
    void check_ticks();
    // What to sleep on besides the own bell: as many held words as fit; a death among the others is announced by whoever
    // watches it. Starts at the next slot up, so that each word is watched by somebody on any host size.
    // False: something has happened to one of them: check_liveness() first.
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
        bool gone = false;
    };
    void add(int slot, shm::Instance* instance);
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
