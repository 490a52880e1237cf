// Whole nodes without IO, driven by hand: nothing moves unless a test says so, so a schedule that once broke the protocol is repeated exactly.
//   Rig rig(3);  rig.comm({0, 1, 2});  auto r = rig.sum(0, buffer);  rig.deliver(0, 1);  rig.settle();
// Links are FIFO queues; cells are one map, a request reaches it and is answered in two steps.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "communicator/node.h"
#include "sim/memory_log.h"

namespace ftcomm::unit {

inline const std::vector<int> kThree = {0, 1, 2};

class Rig {
public:
    static constexpr Time kHeartbeat = 1'000'000'000;
    static constexpr CommId kComm = 7;

    struct Setup {
        std::uint64_t eager_limit = 64;
        Time timeout = 1000 * kHeartbeat;
        bool one_host = true;
        bool reads = false;  // each other's memory, 64 bytes at a time, of whatever is no small message; those go in pieces of 16
        std::uint64_t pull_limit = 1;  // reads: from here on
        bool pushes = false;  // links are quick,
        bool only_first_pushes = false;  // or that of slot 0
        bool near = false;  // memory is shared, but not that of the program
        bool replay = false;  // one log for each host
        bool log_late = false;  // between hosts; settle() leaves it late
        std::vector<std::int32_t> groups{};  // log groups, by slot
        int spread_degree = kSpreadDegree;
        std::uint32_t max_payload = 4096;
        std::uint64_t stream_limit = kNeverStreams;
        bool crowded = false;
        std::uint64_t stage_limit = ~std::uint64_t{0}, stage_bytes = 64;  // reads: windows, too
        std::uint64_t post_limit = 0;
        std::set<int> windowless = {};  // slots that there is no room for a window for
        std::set<int> full = {};  // or for anything
    };
    static Setup replaying(bool one_host = true) {
        Setup s;
        s.replay = true;
        s.one_host = one_host;
        return s;
    }
    explicit Rig(int slots) : Rig(slots, Setup()) {}
    Rig(int slots, Setup setup);
    ~Rig();

    Node& node(int slot);
    void comm(const std::vector<int>& slots, CommId id = kComm, Policy policy = Policy::Lossy);
    void join_comm(int slot, const std::vector<int>& slots, CommId id = kComm, Policy policy = Policy::Lossy);
    Time now() const { return now_; }

    // Links. A held one is left alone by settle(); a full one refuses frames until it is emptied.
    bool deliver(int from, int to);  // the next frame; false: there is none
    void deliver_all(int from, int to);
    std::size_t in_flight(int from, int to) const;
    bool carries(int from, int to, FrameKind kind) const;
    Bytes last_sent(int from, int to, FrameKind kind) const;  // the payload of the newest one under way
    void hold(int from, int to, bool on = true);
    void fill(int from, int to, int room = 0);  // but for so many frames
    void empty(int from, int to);  // room again: the writer is told

    // Cells.
    bool reach(int slot, std::size_t nth = 0);  // the slot's nth oldest request takes effect
    bool answer(int slot);  // its oldest answer arrives
    std::size_t asked(int slot);  // requests that have not reached the cells
    void hold_cells(int slot, bool on = true);  // settle() answers nothing to it
    LogFiles& log(int slot) { return logs_[setup_.one_host ? 0 : slot]; }
    const Bytes& cell(const std::string& key) { return cells_[key]; }

    // Time: everybody ticks every heartbeat/20; `silent` ones hear nobody and are not heard.
    void advance(Time by, const std::vector<int>& silent = {});
    void jump(Time by) { now_ += by; }  // nobody runs
    void tick(int slot);

    void kill(int slot);  // what it sent stays on its way
    void evidence(int observer, int about, Evidence what, int incarnation = -1);
    void restart(int slot);  // a replacement, which asks to come in
    void break_reads(int slot) { broken_reads_.insert(slot); }  // of its memory, in the middle
    void lose_log(int slot) { (logs_[slot] = {}).lost = true; }  // of a dead rank, alone on its host

    void ask_again(int slot, int observer);  // killed, which `observer` tells, and its replacement asks to come in
    // Under the policy replay: killed, which `observer` tells, and again a member of the communicator of these slots.
    void replace(int slot, int observer, const std::vector<int>& slots);

    void settle();  // all that is not held moves, until nothing does
    // At what others show. One that is awake does it in settle() when a word that it watches has changed, all when they are nudged.
    bool has_news(int slot);
    void sleep(int slot, bool on = true);
    void look(int slot) { node(slot).look(now_); }
    bool nudged(int slot);  // and has not looked since
    void lose_nudge(int slot);  // who was to give it has died before
    bool work(int slot);  // a bit of what waits for no frame; false: there is none
    void go_on(const std::vector<int>& slots);  // both, until these have nothing to do

    RequestPtr mark(int slot, const std::string& tag, bool commits);  // a checkpoint, else the resume point
    std::vector<RequestPtr> mark_all(const std::string& tag, bool commits);  // of all slots, together; done
    // small all-reduce over one number
    RequestPtr sum(int slot, std::int64_t& value, CommId id = kComm);

    bool traced(int slot, const std::string& transition);
    std::size_t windows() const { return windows_.size(); }  // that there ever were
    std::size_t decisions(int slot);  // that it has applied
    std::uint32_t last_decided(int slot);  // their newest attempt; 0: none
    bool removed(int by, int slot, Evidence why);  // it has seen the slot leave the view for this reason

private:
    struct Peer;
    struct Frame {
        std::uint32_t from_incarnation, to_incarnation;
        FrameHeader header;
        Bytes payload;
    };
    struct Link {
        std::deque<Frame> frames;
        bool held = false;
        int room = -1;  // frames; below 0: any number
    };
    struct Asked {
        std::string key;
        bool swap;
        Bytes expected, desired;
        std::uint64_t request;
    };
    Peer& peer(int slot) { return *peers_[static_cast<std::size_t>(slot)]; }
    void start(int slot, std::uint32_t incarnation);
    Link& link(int from, int to) { return links_[{from, to}]; }

    Setup setup_;
    std::map<int, LogFiles> logs_;  // by host
    Time now_ = 0;
    struct Shown {
        int slot;
        std::uint32_t incarnation;
        Bytes memory;
    };
    std::deque<Shown> windows_;  // outlive the peers
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<std::unique_ptr<Peer>> dead_;
    std::map<std::pair<int, int>, Link> links_;
    std::map<std::string, Bytes> cells_;
    std::set<int> broken_reads_;
};

std::vector<Code> codes(const std::vector<RequestPtr>& requests);

}  // namespace ftcomm::unit
