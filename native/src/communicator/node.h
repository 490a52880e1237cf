// One rank's whole protocol: job view, communicators, point-to-point, decisions. Sans-IO and single-threaded: whoever owns
// the node (the runtime's engine, or the simulator) calls one input at a time and gives the clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "base/streaming.h"
#include "channel/frame.h"
#include "channel/log.h"
#include "channel/spread.h"
#include "communicator/request.h"
#include "membership/authority.h"
#include "transport/transport.h"

namespace ftcomm {

// What happened, for events.jsonl, the terminal and the simulator's checker. Ranks are job slots.
struct NodeEvent {
    enum class Kind : std::uint8_t {
        Suspected,     // slot, evidence: this rank proposes its removal
        ViewChanged,   // epoch, ranks = alive
        Removed,       // slot, evidence, epoch
        Frozen,        // comm, attempt voted for
        Decided,       // comm, attempt; text = plan in words ("repair #12: 3 of 4 contribute to 128 of 128 segments")
        Repaired,      // comm, seq, ranks = contributors; an operation completed under a repair plan
        Failed,        // comm, seq; text = the error
        Joined,        // slot, incarnation, epoch
        Stale,         // this rank was voted out
        AuthorityLost,
        CaughtUp,      // comm, seq; replay: this process has done again what one before it had done
        JoinWaiting,   // slot, incarnation: a replacement asks to come in
        Restored,      // comm; replay: this process has got back from others the log that was lost with a host
    };
    Kind kind{};
    int slot = -1;
    std::uint32_t incarnation = 0;
    std::uint64_t epoch = 0;
    CommId comm = 0;
    std::uint64_t seq = 0;
    std::uint32_t attempt = 0;
    Evidence evidence = Evidence::None;
    RankSet ranks{};
    Time silence = 0;   // Suspected by heartbeat: how long nothing was heard
    std::string text{};
};
const char* to_string(NodeEvent::Kind kind);

// What the node asks of its owner besides frames and cells.
class NodeHost {
public:
    virtual ~NodeHost() = default;
    virtual void event(const NodeEvent& event) = 0;
    // `request` has just become done. Called inside an input; run on_done and wake waiters after it returns.
    virtual void completed(const RequestPtr& request) = 0;
    // The collective result of one rank was decided; for the simulator's checker. Default: nothing.
    virtual void trace(const char* transition) { (void)transition; }
};

// Up to so many ranks a small operation goes straight from each to each: one message after another, but n(n-1) of them.
inline constexpr std::size_t kStraight = 8, kStraightOnHost = 4;

struct NodeConfig {
    std::string job;                 // cell keys are "<job>/..."
    int slot = 0;
    std::uint32_t incarnation = 0;
    int world_size = 1;
    bool joining = false;            // incarnation > 0: outside until a join point admits it
    std::uint64_t boot = 0;          // the authority's boot nonce, fixed at formation (M3)
    std::uint64_t seed = 1;          // nonces and jitter: the node draws on no other randomness
    Time heartbeat = 1'000'000'000;
    Time timeout = 1'800'000'000'000;
    Time leave_timeout = 0;          // 0: two heartbeats
    std::vector<std::uint64_t> hosts;  // per slot: host identity hash (M12)
    std::uint64_t flat_limit = 0;    // 0: default table (C8: equal on all ranks, checked at rendezvous)
    std::uint64_t pull_limit = 0;    // from here on memory is read where it can be; 0: default (C8, as flat_limit)
    std::uint64_t reduce_pull_limit = 0;  // the same of all-reduce alone; 0: as pull_limit
    // What ranks that share processors do by windows of shared memory goes so from here on (C8, as flat_limit), so much at a time.
    std::uint64_t stage_limit = 0, stage_bytes = 512u << 10;
    std::uint64_t post_limit =
        0;  // what a rank puts into a small operation of one host is shown to the others up to here, not sent
    std::uint64_t segment_bytes = 0;  // 0: min(64 KiB, transport max)
    // Of a small message on one host: its receiver copies one out while the next one goes in. And what of a gather, scatter or all-to-all
    // comes without being asked for.
    std::uint64_t piece_bytes = 16u << 10;
    std::uint64_t read_bytes =
        4u << 20;  // of another's memory at a time: ticks and other communicators get their turn in between
    std::uint64_t eager_limit = 65536;
    // From so many bytes on links of this host are written past the caches (base/streaming.h), and where they are, some algorithms are others
    // (C8: the same on all ranks of a host). Not in the simulator, where they would follow the machine that it runs on.
    std::uint64_t stream_limit = kNeverStreams;
    bool paces_streams = false;  // but only while that is faster than into the caches (base/shared_writer.h)
    bool streams() const { return stream_limit != kNeverStreams; }
    bool pushes = false;  // what the other one of two ranks could read is sent to it while that is quick (Sender::is_quick)
    bool goes_round = false;  // windows are used as where links are streamed, and quick; simulator only
    std::uint32_t quick = 0;  // so are links, once of so many times; 0: never; simulator only
    bool own_processor = true;  // every rank of this host has one
    int spread_degree = kSpreadDegree;  // of the trees along which control records go (channel/spread.h)
    bool flat_trees = true, vote_trees = true;  // small operations and votes go along them, too, where ranks are many
    bool has_flat_trees(std::size_t ranks) const {
        return flat_trees && ranks > std::min<std::size_t>(kStraight, static_cast<std::size_t>(spread_degree) + 1);
    }
    bool has_vote_trees(int ranks) const { return vote_trees && ranks > spread_degree + 1; }
    std::vector<std::string> mutations;  // rules switched off, simulator only: "C1" ... "M17"
    // Policy replay: where this rank logs, and finds what processes before it have logged. All communicators of the job are replay then.
    Log* log = nullptr;
    bool log_late = false;  // messages between hosts are logged off the critical path (channel/late_log.h)
    bool again = false;  // it is not the slot's first process: what it holds of earlier ones is in the log
    Bytes initial_view;  // the job cell's content after formation (see View in membership/view.h)
};

struct CommSpec {
    CommId id = 0;
    std::string name;  // for messages: "world", "split(0)"
    std::vector<int> members;  // job slot of each communicator rank; must contain the node's own slot
    Policy policy = Policy::Raise;
    Time timeout = 0;  // 0: the job's
};

class NodeImpl;

class Node {
public:
    Node(NodeConfig config, Transport& transport, Authority& authority, NodeHost& host, Time now);
    ~Node();

    // The content that formation writes into the cell "<job>/view" by compare_and_set from empty.
    // `finished`: slots that have left for good before (replay: a later generation of the job). `groups`: the log group of each slot
    // (replay; empty: every message is logged). `crowded`: see JobView.
    static Bytes make_initial_view(const std::string& job, std::uint64_t boot, const std::vector<std::uint32_t>& incarnations,
                                   const RankSet& finished = {}, const std::vector<std::int32_t>& groups = {},
                                   bool crowded = false);
    static std::string view_key(const std::string& job);

    // Inputs. `now` never goes back.
    void on_frame(Time now, int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload);
    // Where the payload of the next frame from there may be put, as of now, before it comes with on_frame; null: it has no place.
    std::byte* place(int slot, std::uint32_t incarnation, const FrameHeader& header) const;
    void on_writable(Time now, int slot);
    void on_evidence(Time now, int slot, std::uint32_t incarnation, Evidence evidence);
    // Something showed that the peer runs (a tick counter moved, a ping arrived). Frames imply it.
    void on_heard(Time now, int slot, std::uint32_t incarnation);
    void on_cell(Time now, CellReply reply);
    // There may be something to see in the windows of others (Transport::watch_words, nudge).
    void look(Time now);
    // At least every heartbeat/20; a longer gap than heartbeat/4 counts as "this rank was not running" (M11).
    void on_tick(Time now);
    // Work that waits for no input: as long as has_work(), call work() again and again, with other inputs between.
    bool has_work() const;
    // Work that is best done while this rank waits for something, before it sleeps; if it never waits, it becomes work in time.
    bool has_idle_work() const;
    // Before waiting callers are told that the job is closed: no peer reads their buffers any more (C9), no run touches them.
    void halt();
    void work(Time now);
    Time tick_interval() const;

    // Posts. Errors, too, are reported at the request.
    Status create_comm(Time now, const CommSpec& spec);
    // The memory of a request that ended well and that nobody else holds, for the next one that is posted; null is none.
    void reuse(RequestPtr request);
    RequestPtr collective(Time now, CommId comm, const OpDesc& desc);
    RequestPtr send(Time now, CommId comm, const void* data, std::uint64_t bytes, int dst, std::int64_t tag);
    RequestPtr recv(Time now, CommId comm, void* data, std::uint64_t bytes, int src /* or kAny, kAnyOrFail */, std::int64_t tag);
    RequestPtr agree(Time now, CommId comm, std::int64_t flag);
    RequestPtr shrink(Time now, CommId comm);
    void revoke(Time now, CommId comm);
    // Gives up on a request (Ctrl-C, a wait's own timeout): proposes its failure to the vote (C7); it still completes.
    void fail_request(Time now, const RequestPtr& request, Code why);
    void close_comm(Time now, CommId comm);
    // Replay, see communicator/checkpoint_agreement.cc. Collective. comm_resume: an empty tag is the resume point itself.
    RequestPtr comm_resume(Time now, CommId comm, const std::string& tag);
    RequestPtr comm_resume_noted(Time now, CommId comm, const std::string& tag);
    RequestPtr comm_commit(Time now, CommId comm, const std::string& tag);
    // Replay: done at once, but for a communicator whose log is lost (communicator/restore.h): nothing is to be posted on it before.
    RequestPtr comm_ready(Time now, CommId comm);
    std::vector<std::string> comm_checkpoints(CommId comm) const;
    Status comm_note(Time now, CommId comm, const std::string& tag);
    std::vector<std::string> comm_notes(CommId comm) const;
    // Of the messages that this rank sends from now on; see LoggedPairs. Does nothing under other policies than replay.
    void comm_log_position(CommId comm, std::uint64_t iteration, std::optional<std::uint32_t> micro_batch);
    // A process that does again what is in its log, without computing it: see LoggedPairs. False, nullopt: not under the policy replay.
    bool comm_hollow(CommId comm, bool on);
    struct Ahead {  // by rank: messages that this process has sent and received, and those that the log still has for it
        std::uint64_t operations = 0;  // posted so far
        std::vector<std::uint64_t> sent, received, sends_left, receives_left;
    };
    std::optional<Ahead> comm_ahead(CommId comm);
    Status comm_logged(CommId comm, int dst, std::uint64_t seq, LogRecord* out);  // with its checksum
    Status flush_log(Time now);  // what is logged late is in the log when it returns
    std::uint64_t late_records() const;
    // Membership of the process. join_wait: a replacement; done when admitted. admit: survivors, collectively (M13): all
    // waiting replacements come in; `survivors` of the request = members afterwards.
    RequestPtr join_wait(Time now);
    RequestPtr admit(Time now);
    RequestPtr leave(Time now);  // done when nobody needs this rank any more: then exit

    // Queries.
    std::uint64_t epoch() const;
    bool stale() const;
    RankSet alive_slots() const;
    RankSet waiting_slots() const;  // replacements asking to come in
    std::uint32_t incarnation_of(int slot) const;
    RankSet comm_alive(CommId comm) const;  // communicator ranks, by its last decision
    std::vector<int> comm_failed(
        CommId comm);  // dead by the newest view, acknowledged or not: those first that it has heard of first
    void ack_failed(CommId comm, int n);  // -1: all
    bool comm_revoked(CommId comm) const;
    bool reads_refused() const;  // by the kernel, of a living rank's memory, in some communicator: it does not read any more
    bool lacks_windows() const;  // there was no room for some rank's, in some communicator: it does without
    bool comm_solo(CommId comm) const;  // joiner before admission: collectives act on itself
    std::uint64_t comm_seq(CommId comm) const;  // next operation number
    int comm_size(CommId comm) const;  // 0: there is no such communicator
    bool left_with_group() const;  // voted out because one of its log group died
    bool is_crowded() const;  // JobView::crowded
    RankSet log_group() const;  // slots that start again with this one; empty: every message is logged
    // True when nothing is open: used by tests and by the quiet invariant.
    bool idle() const;

private:
    std::unique_ptr<NodeImpl> impl_;
};

}  // namespace ftcomm
