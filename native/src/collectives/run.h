// A run carries one operation (or its repair) through one attempt: ring, flat, flat along a tree, direct, pull, groups, stage, blocks, exchange. Sans-IO.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/shared_writer.h"
#include "channel/log.h"
#include "channel/sender.h"
#include "collectives/board.h"
#include "collectives/op_state.h"
#include "collectives/posts.h"
#include "collectives/records.h"
#include "collectives/ticket_words.h"
#include "membership/rules.h"

namespace ftcomm {

// Replay: told when all of an operation's data is here and the fence has not begun, so that whoever returns knows that every rank's log has
// its result. False: it could not be logged, and the fence must not begin.
class ResultLog {
public:
    virtual ~ResultLog() = default;
    virtual bool log_result(const OpState& op) = 0;
    // Where all ranks are on one host, what this rank owns of an all-reduce may go into its log as it becomes final, and the others read it
    // there: begun, then put from its first segment to its last, before log_result. False: it is not done so (any more).
    virtual bool begin_share(const OpState& op) = 0;
    virtual bool put_in_share(ByteView piece) = 0;
    // Bytes of what `rank` owns, from `at` on. Code::Invalid: not there any more, as that rank is gone or has given the attempt up.
    virtual Status view_share(const OpState& op, int rank, std::uint64_t at, std::uint64_t bytes, Log::View* out) = 0;
};

// The memory of a flat run: its result, and behind it the inputs that wait for others. A communicator has two of them, used in turn: a
// result without a fence stays there, in case a rank turns out to lack it (C6), while the next operation's inputs come in.
struct FlatRoom {
    static constexpr std::size_t kMuch =
        4u << 20;  // a smaller room stays for later operations: fresh pages cost more than the sum
    Bytes room;
    std::vector<const std::byte*> parts;  // of a sum: the inputs by position, or own and those from below
    void trim() {  // of a run that was not over
        if (room.size() > kMuch) room = Bytes();  // not {}: that keeps the room
    }
};

// What a run may use. Positions are indices into `living`, ascending communicator ranks; neighbours are by position.
struct RunEnv {
    Sender& sender;
    const std::vector<int>& slots;  // communicator rank -> job slot
    CommId comm = 0;
    std::uint32_t attempt = 0;
    int rank = 0;
    const std::vector<int>& living;
    int position = 0;
    Rules rules{};
    Transport* memory = nullptr;  // pull, groups, direct: reads the memory of peers
    Bytes* scratch = nullptr;  // pull, groups, flat
    FlatRoom* flat = nullptr;  // flat
    TicketWords* tickets = nullptr;  // pull, groups, direct: whether this rank's buffers still are the operation's

    std::vector<Transport::Window>* windows = nullptr;  // stage, blocks, exchange: those of this rank that no run uses
    Board* board = nullptr;  // the same, and flat where there are posts
    std::uint64_t stage_bytes = 0;  // the same: of a chunk
    SharedWriter* shared = nullptr;  // the same: writes there

    Posts* posts = nullptr;  // flat: of a whole communicator on one host
    std::uint64_t post_limit = 0;  // what this rank puts in it shows up to so many bytes,
    bool shows = false;  // if it may: else it sends that, and looks at what others show

    ResultLog* log = nullptr;  // replay
    bool own_processor = true;  // every rank of this host has one
    bool pushes = false;  // NodeConfig's, of two ranks
    bool crowded = false;  // all are on one host, and some share its processors; the same on all (C8)
    bool needs_inputs = true;  // until they are finals, as a death is survived: not under the policy raise

    int size() const { return static_cast<int>(living.size()); }
    int rank_at(int position_in) const { return living[static_cast<std::size_t>((position_in + size()) % size())]; }
    int successor() const { return rank_at(position + 1); }
    int predecessor() const { return rank_at(position - 1); }
    int slot_of(int rank_in) const { return slots[static_cast<std::size_t>(rank_in)]; }
    int position_of(int rank_in) const {
        for (int i = 0; i < size(); ++i)
            if (living[static_cast<std::size_t>(i)] == rank_in) return i;
        return -1;
    }
    // Whether so many bytes come to the other one sooner by the link than it can read them. Of more, the one copy of a read is as fast.
    bool comes_sooner(int rank_in, std::uint64_t bytes) const {
        constexpr std::uint64_t kMost = 256u << 10;
        return pushes && bytes <= kMost && sender.is_quick(slot_of(rank_in));
    }
    FrameHeader header(FrameKind kind, const OpState& op) const {
        FrameHeader h;
        h.kind = kind;
        h.attempt = attempt;
        h.comm = comm;
        h.seq = op.seq;
        h.aux = op.signature;  // every frame says which operation its sender means: a mismatch can't hide
        return h;
    }
};

class Run {
public:
    virtual ~Run() = default;
    // What this rank has for itself (OpState::bring_in) nobody waits for: a run may copy it last, the last kOwnLast bytes behind the beginning of
    // its fence; and then has to have done so before it is given up, since others may have returned.
    static constexpr std::uint64_t kOwnLast = 4u << 20;
    virtual bool brings_in() const { return false; }
    virtual void settle() {}
    virtual void start() = 0;
    virtual void on_frame(int from_rank, const FrameHeader& header, ByteView payload) = 0;
    virtual void on_writable(int slot) { (void)slot; }
    virtual void on_tick() {}
    // For what others show; and where something is to appear that it has not found yet.
    virtual void look() {}
    virtual void add_words(std::vector<Transport::Word>& words) const { (void)words; }
    virtual bool done() const = 0;
    // Through its fence, and so all frames of all have come.
    virtual bool all_have_come() const { return false; }
    // Work that waits for no frame: done in pieces, so that ticks and other communicators get their turn between them.
    virtual bool has_work() const { return false; }
    virtual void work() {}
    // Of a run that is done and had no fence: its result, there until the run after the next begins.
    virtual const FlatRoom* kept() const { return nullptr; }
    virtual bool is_reusable() const { return false; }  // make_flat_run may have its memory
    // What it waits for, for timeouts and `stats`: e.g. "3 segments", "fence round 1".
    virtual const char* phase() const = 0;
    bool mismatch = false;  // a peer's sizes disagree: the communicator proposes failure
    bool refused = false;  // the kernel does not let this rank read a living peer's memory: the same
    bool no_window = false;  // there is no room for this rank's window: the same, and it is done without

protected:
    static constexpr int kPatience = 2;  // ticks, after which who waits tells the others so: they may have called something else
};

// Before a fence: false: the result could not be logged, and it must not begin.
bool logs_result(const RunEnv& env, const OpState& op);

// The completion fence. When one rank is through, all ranks had begun it, so all have all their data. Two forms, which differ in who
// waits for whom: a dissemination barrier over the living (Hensgen, Finkel, Manber 1988), one message time for each of log2(n) rounds;
// or a central one (Mellor-Crummey and Scott 1991), where all tell one rank, which tells all. That is two message times and a wait
// for each rank, not log2(n): where ranks share processors, a wait is a switch to another one, and costs more than a message.
class Fence {
public:
    Fence(RunEnv& env, const OpState& op) : env_(env), op_(op) {}
    void begin();
    void on_frame(const FrameHeader& header);
    bool begun() const { return begun_; }
    bool done() const { return done_; }

private:
    static constexpr std::uint16_t kWord = 62, kRelease = 63;  // steps; those below are rounds
    static constexpr int kCentralFrom = 3;  // ranks: with two both forms are one message each way
    bool is_central() const { return env_.crowded && env_.size() >= kCentralFrom; }
    void advance_rounds();
    void advance_central();
    void send(int position, std::uint16_t step);
    void finish();
    RunEnv& env_;
    const OpState& op_;
    std::uint64_t got_ = 0;  // bit per round, and the release
    int words_ = 0;  // of the central form, at position 0
    int round_ = 0;
    bool begun_ = false, done_ = false;
};

std::unique_ptr<Run> make_ring_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, bool fence);
std::unique_ptr<Run> make_pull_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket);
// Of a plan in which all that is left is to be reduced, by all (is_whole). It adds in the order of the ranks, as make_pull_run, or as
// make_ring_run.
std::unique_ptr<Run> make_stage_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket,
                                    bool in_rank_order);
bool is_whole(const std::vector<SegmentRun>& plan, const std::vector<int>& living);
// Of a plan in which each block comes from the rank whose it is (is_first_hand).
std::unique_ptr<Run> make_block_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket);
bool is_first_hand(const std::vector<SegmentRun>& plan);
// Of an all-to-all whose parts are all as long, among all members.
std::unique_ptr<Run> make_exchange_run(RunEnv env, OpState& op, std::uint64_t ticket);
inline constexpr std::size_t kMostStaged = 16;  // ranks: of more the chunks would leave the caches
std::unique_ptr<Run> make_groups_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, bool fence, std::uint64_t ticket);
// `old`: a flat run that is over, whose memory it takes, or null.
std::unique_ptr<Run> make_flat_run(RunEnv env, OpState& op, std::unique_ptr<Run> old);
// The same along a tree (channel/spread.h).
std::unique_ptr<Run> make_flat_tree_run(RunEnv env, OpState& op, int degree);
struct DirectLimits {  // bytes of what goes from one rank to another
    std::uint64_t show = 0;  // from here on it is read there, where it can be
    std::uint64_t read_bytes = 0;  // so much at a time
    std::uint64_t bring = 0;  // up to here it comes before it is asked for, and is kept
};
std::unique_ptr<Run> make_direct_run(RunEnv env, OpState& op, DirectLimits limits, std::uint64_t ticket);

// An operation of a communicator with one living rank, or of a replacement that is not admitted yet (`solo`).
void run_alone(OpState& op, int ranks, int rank, const std::vector<SegmentRun>& plan, bool solo);

}  // namespace ftcomm
