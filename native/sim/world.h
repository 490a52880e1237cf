// One simulated run: the ranks, the links and the store between them, the faults, and the clock that drives them all.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "communicator/node.h"
#include "sim/checker.h"
#include "sim/detection.h"
#include "sim/program.h"
#include "sim/queue.h"
#include "sim/random.h"
#include "sim/report.h"
#include "sim/scenario.h"
#include "sim/sim_authority.h"
#include "sim/sim_log.h"
#include "sim/sim_transport.h"

namespace ftcomm::sim {

// One incarnation of a slot: a process.
struct Instance final : NodeHost {
    Instance(World& w, int i, int s, std::uint32_t inc)
        : world(w), id(i), slot(s), incarnation(inc), transport(w, *this), authority(w, *this) {}

    bool running() const { return node != nullptr && !crashed; }
    void event(const NodeEvent& event) override;
    void completed(const RequestPtr& request) override;
    void trace(const char* transition) override;

    World& world;
    const int id;
    const int slot;
    const std::uint32_t incarnation;
    SimTransport transport;
    SimAuthority authority;
    std::vector<std::uint32_t> known_incarnations;  // at its start, per slot
    std::unique_ptr<Program> program;
    std::unique_ptr<SimLog> log;     // replay
    std::unique_ptr<Node> node;      // destroyed before the program, whose buffers it uses
    std::vector<RequestPtr> just_completed;
    bool crashed = false;            // dead; set in the middle of an input when its frames have run out
    bool left = false;               // exited after a leave
    bool was_stale = false;
    int crash_after = -1;            // frames until death, -1: lives
    int lost_host = -1;              // died with its host (Detection::host_lost), silently
    bool work_queued = false;
    bool look_queued = false;
    bool inside = false;             // an input is being worked on
    std::vector<std::pair<std::byte*, Bytes>>
        left_windows;  // the small ones, of who died in the middle of an input: as they were then
    int stop_after = -1;             // frames until it stops for stop_for
    Time stop_for = 0;
    Time stopped_until = 0;
    Time hold_until = 0;             // frames after a stop in mid-burst leave when it wakes
    RankSet view;                    // by its last ViewChanged
    std::uint64_t epoch = 0;
};

class World {
public:
    World(const Scenario& scenario, const std::vector<std::string>& mutations, Counters& counters, bool live_trace);

    void compare_with(const History* undisturbed) { checker_.compare_with(undisturbed); }
    void run();                      // until all is done or an invariant broke

    Time now() const { return queue_.now(); }
    Queue& queue() { return queue_; }
    Trace& trace() { return trace_; }
    Counters& counters() { return counters_; }
    Links& links() { return links_; }
    Store& store() { return store_; }
    Random& random() { return random_; }
    Checker& checker() { return checker_; }
    const Scenario& scenario() const { return scenario_; }
    const Violation& violation() const { return violation_; }
    bool safety_over() const { return safety_over_; }

    Instance& instance(int id) { return *instances_[static_cast<std::size_t>(id)]; }
    std::vector<std::unique_ptr<Instance>>& instances() { return instances_; }
    struct Window {
        int owner;  // instance
        std::size_t bytes;
        std::unique_ptr<std::byte[]> memory;
    };
    std::vector<Window>& windows() { return windows_; }
    // From one window's place to the next one's: more than there is in one.
    static constexpr std::uint64_t kPlace = 1ull << 32;
    static std::uint64_t place_of(std::size_t number) { return number * kPlace; }
    static std::size_t offset_of(std::uint64_t place) { return static_cast<std::size_t>(place % kPlace); }
    // In which the place is; null: there was no room for it.
    const Window* window_at(int owner, std::uint64_t place) const;
    void killed(Instance& who);  // its node goes, and puts nothing in order
    void discard_windows(int owner);
    void look_soon(Instance& who);
    bool sleeps() { return looks_.chance(0.5); }
    Instance* find(int slot, std::uint32_t incarnation);
    Instance* newest(int slot);      // may be dead

    template <class F>
    void input(Instance& who, F&& call) {
        if (!who.running()) return;
        FT_CHECK(!who.inside, "simulator: input inside an input of slot %d", who.slot);
        who.inside = true;
        call(*who.node, now());
        who.inside = false;
        after_input(who);
    }
    void deliver(int from, Instance& to, Frame& frame, bool nested = false);
    std::byte* place(int from, const Instance& to, const FrameHeader& header) const;  // of the frame's payload, now
    bool same_host(int a, int b) const {
        return scenario_.hosts[static_cast<std::size_t>(a)] == scenario_.hosts[static_cast<std::size_t>(b)];
    }
    bool may_send(Instance& who);    // counts down to a crash or a stop in the middle of a burst
    bool may_read(Instance& who) { return !who.crashed; }
    bool may_ask(Instance& who) { return !who.crashed; }
    void on_event(Instance& who, const NodeEvent& event);
    void on_transition(Instance& who, const char* name);
    void begins_group(Instance& who, int group);
    void leaves(Instance& who);      // a rank that was to die later dies now
    void exited(Instance& who);      // the process ends by itself: it left, or was voted out
    void wake_program(Instance& who, Time delay);
    void violate(const char* invariant, const char* format, ...) __attribute__((format(printf, 3, 4)));
    void progress() { last_progress_ = now(); }
    // Replay: what the program of a slot has saved under a tag; it outlives processes and hosts.
    void save(int slot, const std::string& tag, Saved what) { saved_[{slot, tag}] = std::move(what); }
    // A log group goes back to the oldest that one of its ranks can load: two ranks with damaged ones may go back too far.
    bool may_damage(int slot) const {
        return scenario_.log_groups.empty() || damaged_.count(scenario_.log_groups[static_cast<std::size_t>(slot)]) == 0;
    }
    void damaged(int slot) {
        if (!scenario_.log_groups.empty()) damaged_.insert(scenario_.log_groups[static_cast<std::size_t>(slot)]);
    }
    const Saved* saved(int slot, const std::string& tag) const {
        const auto it = saved_.find({slot, tag});
        return it == saved_.end() ? nullptr : &it->second;
    }

private:
    std::vector<Window> windows_;
    Instance& start(int slot, std::uint32_t incarnation);
    void dispatch(const Event& e);
    void tick(Instance& who);
    void evidence(Instance& observer, Instance& about, Evidence kind);
    void after_input(Instance& who);
    void shows(Instance& who);
    void died(Instance& who);
    void tell_of_exit(Instance& who, bool host_gone);
    void host_death(Instance& who, int lost_host);
    void happens(Trigger trigger, Instance& emitter, int subject);
    void fire(Fault& fault, Instance* emitter, int subject);
    void carry_out(const Fault& fault, Instance& victim);
    void lose_host(const Instance& victim);
    void isolate(const Fault& fault, const Instance& victim);
    void firewall(const Fault& fault, const Instance& victim);
    void end_safety();
    void check_stall();
    bool all_done();
    std::string stuck();
    int running_count();
    // replay.cc: the launcher
    std::string job() const { return generation_ == 0 ? "sim" : "sim/" + std::to_string(generation_); }
    bool is_member(const Instance& who);  // by the head cell
    bool is_last(const Instance& who);    // who is to stay, or nobody would be left
    bool somebody_left();
    void replace(int slot, std::uint32_t incarnation);
    void look_for_survivors();
    void start_again(int generation);

    const Scenario& scenario_;
    std::vector<Fault> faults_;      // with what has happened of them
    std::vector<std::string> mutations_;
    Counters& counters_;
    Trace trace_;
    Queue queue_;
    Random random_, looks_;
    Links links_;
    Store store_;
    Checker checker_;
    Detection detection_;
    std::vector<std::unique_ptr<Instance>> instances_;
    Bytes initial_view_;
    Violation violation_;
    Time last_progress_ = 0;
    Time last_input_fault_ = 0;
    Time quiet_after_ = 0;           // when all faults fired so far have run out
    bool safety_over_ = false;
    std::vector<int> event_counts_;
    std::uint64_t events_ = 0;
    int injected_ = 0;               // faults that have really happened
    bool in_recovery_ = false;       // one of them during a recovery
    std::map<std::uint64_t, LogFiles> logs_;  // by host
    std::map<std::pair<int, std::string>, Saved> saved_;
    std::set<std::int32_t> damaged_;  // log groups of which one rank has found a damaged checkpoint
    int generation_ = 0;             // replay: how often all ranks have been started again
    bool agents_ = false;            // hosts have an agent that reports exits
};

}  // namespace ftcomm::sim
