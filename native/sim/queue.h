// Virtual time: one queue of events, ordered by time and then by the order in which they were scheduled.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "communicator/request.h"

namespace ftcomm::sim {

enum class EventKind : std::uint8_t {
    Deliver,       // a = link
    Writable,      // a = link
    CellRequest,   // a = index of a pending cell operation: it reaches the authority
    CellReply,     // a = index of a pending cell operation: its answer reaches the node
    Tick,          // a = instance
    Program,       // a = instance: its script looks at what has completed
    FailRequest,   // a = instance, b = step
    Revoke,        // a = instance, b = comm index
    Evidence,      // a = observer instance, b = instance concerned, c = Evidence
    Heard,         // a = observer instance, b = instance: a broken connection between them is back
    Spawn,         // a = slot, b = incarnation: its replacement starts
    EndSafety,
    Detected,      // a = dead instance: by now everybody must know
    Work,          // a = instance: a piece of work that waits for no input
    Killed,        // a = instance
    Generation,    // a = generation of which nobody is left
    Look,          // a = instance: at what others show
    HostDeath,     // a = instance, b = lost host: it goes silent with its host
};

struct Event {
    Time at = 0;
    std::uint64_t order = 0;
    EventKind kind{};
    int a = 0, b = 0, c = 0;
};

class Queue {
public:
    void push(Time at, EventKind kind, int a = 0, int b = 0, int c = 0) {
        heap_.push_back({std::max(at, now_), next_++, kind, a, b, c});
        std::push_heap(heap_.begin(), heap_.end(), later);
    }
    bool empty() const { return heap_.empty(); }
    Event pop() {
        std::pop_heap(heap_.begin(), heap_.end(), later);
        Event e = heap_.back();
        heap_.pop_back();
        now_ = e.at;
        return e;
    }
    Time now() const { return now_; }

private:
    static bool later(const Event& x, const Event& y) { return x.at != y.at ? x.at > y.at : x.order > y.order; }
    std::vector<Event> heap_;
    std::uint64_t next_ = 0;
    Time now_ = 1'000'000'000;  // not zero: a node must not take zero for "never"
};

}  // namespace ftcomm::sim
