// What one seed does: ranks, hosts, communicators, the script that all ranks run, and the faults. All drawn at the start.
#pragma once

#include <string>
#include <vector>

#include "communicator/node.h"
#include "sim/random.h"

namespace ftcomm::sim {

inline constexpr Time kHeartbeat = 1'000'000'000;
inline constexpr Time kMs = 1'000'000;
inline constexpr Time kUs = 1'000;

struct CommPlan {
    std::string name;
    std::vector<int> members;  // slots
    Policy policy = Policy::Raise;
    Time timeout = 0;
    int created_at = 0;        // group
};

bool is_uniform(OpKind kind);   // the same result on every rank
bool is_reduction(OpKind kind);

enum class StepKind : std::uint8_t {
    Collective,
    Ring,
    Any,
    Agree,
    Admit,
    // Replay only (program_replay.cc):
    Web,         // several messages between many pairs, also to oneself
    WebSend,     // only sent here,
    WebReceive,  // and received here, of step `of`
    FanIn,       // all send to the root, which receives from anyone
    Answer,      // the root tells each of them in which order it heard the fan-in `of`
    Commit,      // a checkpoint of all ranks
};

struct Step {
    StepKind kind = StepKind::Collective;
    int comm = 0;
    OpKind op = OpKind::Barrier;
    DType dtype = DType::Int32;
    ReduceOp reduce = ReduceOp::Sum;
    Algorithm algorithm = Algorithm::Auto;
    int root = 0;               // modulo the communicator's size
    std::uint64_t count = 0;
    bool uneven = false;
    int counts_slot = -1;       // of an even all-to-all: this rank gives its counts, the others none
    int odd_slot = -1;          // this rank calls something else
    int failing_slot = -1;      // this rank gives up on the request after a while
    int revoking_slot = -1;     // this rank revokes the communicator after posting
    int quitting_slot = -1;     // this rank does not call it: it revokes the communicator and goes to shrink
    int sleeping_slot = -1;     // this rank is late by `nap`
    Time nap = 0;
    bool refused = false;       // Commit: a message of a WebSend is under way
    int of = -1;                // WebReceive, Answer: the step that this one goes on from
    int each = 1;               // Web, FanIn: messages from one rank to another, at most
};

enum class FaultKind : std::uint8_t {
    Crash,
    CrashHost,
    CrashAll,       // replay: nobody is left; the launcher starts all of them again
    Stop,
    CutLink,
    Isolate,
    Reset,          // of one link that heals at once
    Firewall,       // resets between one host and all others, for a while
    AuthoritySlow,
    AuthorityUnknown,
    AuthorityLost,
    AuthorityBlank,
    Pause,
};
const char* to_string(FaultKind kind);

// When a fault happens: as some rank begins a group of steps, or at the nth event of a kind anywhere (in a recovery).
enum class Trigger : std::uint8_t {
    Group,
    Frozen,
    Decided,
    Suspected,
    ViewChanged,
    JoinWaiting,
    AdmitVote,
    AdmitDecide,
    Joined,
    CaughtUp,
};

struct Fault {
    FaultKind kind = FaultKind::Crash;
    Trigger trigger = Trigger::Group;
    int slot = 0;          // whose group; the victim unless one of the next two
    bool at_emitter = false;   // the rank where the trigger happened
    bool at_subject = false;   // the replacement that it was about
    int group = 0;
    int nth = 1;
    int commits = 0;       // Crash, Stop: after so many more frames of the victim
    Time duration = 0;
    int other = -1;        // CutLink, Reset: the other end
    bool both = false;     // CutLink: both directions
    bool fired = false;
};
inline bool ends_the_job(const Fault& f) { return f.kind == FaultKind::AuthorityLost || f.kind == FaultKind::AuthorityBlank; }

struct Network {
    Time latency_low = 5 * kUs, latency_high = 300 * kUs;
    double spike = 0;                  // chance of a delay up to `spike_high`
    Time spike_high = 0;
    int slow_from = -1, slow_to = -1;  // one link on which each frame takes longer, by up to
    Time slow_by = 0;
    double refuse = 0;                 // chance that reserve() says no for no reason
    std::uint32_t max_payload = 4096;
    int frames = 64;                   // capacity of a link
    Time cell_low = 2 * kUs, cell_high = 50 * kUs;
    Time think = 50 * kUs;             // between a completion and the next call
};

struct Scenario {
    std::uint64_t seed = 0;
    int ranks = 3;
    bool quiet = false;                // nothing may be noticed: pauses of everything, or
    bool resets = false;               // links that are reset and heal
    std::vector<std::uint64_t> hosts;
    std::vector<bool> joinable;        // slots whose dead incarnations are replaced
    bool joins = false;
    std::uint64_t segment_bytes = 32, flat_limit = 0, eager_limit = 64;
    int spread_degree = kSpreadDegree;
    bool flat_trees = true, vote_trees = true;
    bool crowded = false;              // ranks share processors
    bool posts = false;                // ranks of one host show small inputs
    bool stages = false;               // and their all-reduces go by windows
    bool peer_memory = false;          // ranks of one host read each other's memory
    int unreadable = -1;               // slot whose memory the kernel does not let them read, though it had seemed to
    int windowless = -1, room = 0;     // slot that there is only room for so many windows for
    std::uint64_t pull_limit = 1;      // of collectives, where they may be read
    std::vector<CommPlan> comms;
    std::vector<Step> steps;
    std::vector<int> groups;           // first step of each group, and the end
    std::vector<int> leave_at;         // per slot: leaves before this group, -1 stays
    std::vector<Fault> faults;
    Network network;
    bool has_naps = false;
    bool replay = false;               // policy replay: every dead rank is replaced, and nobody may tell from the results
    int resume_group = -1;             // replay: with checkpoints; before this group is what every process does again
    bool log_late = false;             // replay: messages between hosts are logged off the critical path
    std::vector<std::int32_t> log_groups;  // replay: of each slot; messages inside one are in no log. Empty: all are
    bool notes = false;                // replay: ranks note places between checkpoints, each by itself
    bool may_lose_all = false;         // replay: also the last one may die
    int group_count() const { return static_cast<int>(groups.size()) - 1; }
};

Scenario draw_scenario(std::uint64_t seed);
Scenario undisturbed(Scenario s);    // replay: the same without a fault, for reference
inline bool is_replay(std::uint64_t seed) { return seed % 3 == 2; }
std::string describe(const Scenario& s);

}  // namespace ftcomm::sim
