// One communicator of one rank: its operations in order, its share of votes and decisions, agree and shrink.
//
// Operations run strictly one after another, so survivors differ by at most one finished operation. The attempt number counts
// decisions: frames carry it, and from the vote for attempt a+1 on a rank is deaf to frames of attempt a (C1).
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "channel/spread.h"
#include "collectives/op_state.h"
#include "collectives/plan.h"
#include "collectives/run.h"
#include "communicator/ballot.h"
#include "communicator/calls.h"
#include "communicator/core.h"
#include "communicator/failure_log.h"
#include "communicator/last_result.h"
#include "communicator/logged_pairs.h"
#include "communicator/logged_ring.h"
#include "communicator/p2p.h"
#include "communicator/result_stream.h"
#include "communicator/ways.h"

namespace ftcomm {

class Communicator final : private ResultLog {
public:
    // claimed: made by the user's call; otherwise by a peer's vote, so that a rank that has not called yet can vote, too.
    Communicator(Core& core, CommSpec spec, bool claimed);
    ~Communicator();

    void claim(const CommSpec& spec);
    bool claimed() const { return claimed_; }
    const CommSpec& spec() const { return spec_; }

    // Posts.
    RequestPtr collective(const OpDesc& desc);
    RequestPtr send(const void* data, std::uint64_t bytes, int dst, std::int64_t tag);
    RequestPtr recv(void* data, std::uint64_t bytes, int src, std::int64_t tag);
    enum class AgreeKind : std::uint8_t { Agree = 1, Shrink = 2 };
    RequestPtr agree(AgreeKind kind, std::int64_t flag);
    void revoke();
    bool fail_request(const RequestPtr& request, Code why);  // false: not ours
    void close();
    void ack_failed(int n);

    // Of a frame that is_described: where the description begins.
    static ByteView description(FrameKind kind, ByteView payload) {
        return kind == FrameKind::Freeze ? Spread::record_of(payload) : payload;
    }
    // Inputs.
    void on_frame(int slot, const FrameHeader& header, ByteView payload);
    std::byte* place(int slot, const FrameHeader& header);  // Node::place
    // A message heard before its sender was removed and before this communicator was made here.
    void on_last_words(int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload);
    void after_last_words();
    void on_view();                     // somebody is out, or left
    void on_dead_end();                 // stale, or the authority is lost: everything fails
    void on_tick();
    void look();  // something that the run watches for may be there
    void add_words(std::vector<Transport::Word>& words) const {
        if (run_ != nullptr && !frozen_) run_->add_words(words);
    }
    // replay.cc: somebody went, came back, or gets on with its replay: nobody has to answer for the time until now.
    void restart_timers();
    RankSet dead_in(const JobView& view) const;  // its members that have not left
    std::uint64_t replay_progress() const;  // what this process has done again so far
    RequestPtr ready();  // done when the log of the processes before this one is here (restore.h)
    void on_writable(int slot);
    void halt();                        // the job is closed: buffers are the callers' again
    bool work();                        // a piece of what waits for no frame; true: there is more
    // The nth admission let `slots` in, with new incarnations (M13). No entry: nobody who is left had this communicator then.
    void on_admitted(std::uint64_t nth, const AdmitEntry* entry, const RankSet& slots, const RankSet& alive);
    void hold() { held_from_ = next_seq_; }  // admit was called: what is posted from now on waits for the newcomers
    void resume();  // admitting or solo has ended: start what was posted meanwhile

    // Of the policy replay: null under the others.
    class Checkpoints;
    Checkpoints* checkpoints() const { return checkpoints_.get(); }
    void set_log_position(std::uint64_t iteration, std::optional<std::uint32_t> micro_batch) {
        if (pairs_ != nullptr) pairs_->set_position(iteration, micro_batch);
    }
    // The program's own messages; collectives compute as ever (LoggedRing has streams of its own). Null: not under this policy.
    LoggedPairs* messages() { return pairs_.get(); }

    // Queries.
    bool disputed() const { return !disputed_; }  // a peer has made it with other members
    // Others may need what this rank holds: a vote has not ended, or gives them a result out of its hands.
    bool owes() const { return frozen_ || !helpers_.empty(); }
    // Nothing is under way that began before the join point.
    bool quiescent() const;
    bool idle() const {
        return open_.empty() && quiescent() && !cas_busy_ && p2p_.idle() &&
               (pairs_ == nullptr || (pairs_->idle() && (ring_ == nullptr || ring_->idle())));
    }
    // Closed, and nothing is to be done in it until somebody asks for it. (Under replay its logs go on.)
    bool rests() const;
    bool awake = false;  // the node gives it turns
    void shed() {  // memory for operations that will not come
        spare_op_.reset();
        idle_flat_.reset();
        send_what_is_shown();
        board_.give_back();
    }
    bool blocked_on(int slot) const;  // an open operation, agree or message that needs this slot
    AdmitEntry standing() const;
    bool revoked() const { return decision_.revoked; }
    RankSet alive() const { return decision_.alive; }
    RankSet failed() const;
    const std::vector<int>& failed_in_order();
    std::uint64_t next_seq() const { return next_seq_; }
    std::uint64_t done_seq() const { return done_seq_; }
    std::uint64_t agree_seq() const { return decision_.agree_seq; }
    bool solo() const { return core_.solo; }
    bool has_small_sends() const { return p2p_.has_small_sends(); }
    bool frames_only() const { return decision_.frames_only; }
    bool no_windows() const { return decision_.no_windows; }
    std::uint32_t attempt() const { return attempt_; }

private:
    struct Stashed {
        int from;
        FrameHeader header;
        Bytes payload;
    };

    // runs.cc
    const std::vector<int>& living();
    bool all_alive() { return living().size() == spec_.members.size(); }
    RunEnv env();
    bool is_done_again(const OpState& op, const std::vector<SegmentRun>& plan) const;
    std::unique_ptr<Run> make_run(OpState& op, std::vector<SegmentRun> plan, bool repair, bool flat);
    void let_look(RunEnv& e, const OpState& op);

    // operations.cc
    void pump();
    OpState* current() const;
    Status failed_for(const Cause& cause, const OpState& op) const;
    bool start(OpState& op);  // false: it is finished already or cannot start
    void start_run(OpState& op, std::vector<SegmentRun> plan, bool repair);
    void after_progress();
    bool put_on_record(const OpState& op);  // false: it could not be, and the vote decides
    bool is_settled(std::uint64_t seq) const;
    void finish_current(Status status);
    void keep_result(const OpState& op, const FlatRoom* room);
    bool retains_result() const;
    void keep_apart();
    void on_collective(int from, const FrameHeader& header, ByteView payload);
    void send_what_is_shown();
    void words_changed() { core_.words_changed |= looks_; }
    void drop_run();  // with what of it, and of all before it, waits for room
    void take_back(bool has_come);
    std::string name_of(const OpState& op) const;
    Time timeout() const { return spec_.timeout > 0 ? spec_.timeout : core_.config.timeout; }  // of what names none itself

    // dispute.cc: a peer has made it with other members, or another policy
    bool is_disputed_by(int slot, const FrameHeader& header, ByteView payload);
    void dispute(int slot, const CommSpec* theirs);
    std::string difference(const CommSpec* theirs) const;
    void tell_of_dispute(int slot);
    Status dead_end() const { return disputed() ? disputed_ : core_.dead_end(); }
    bool at_dead_end() const { return disputed() || core_.at_dead_end(); }

    // vote.cc: freeze, vote; decide.cc: decide, apply
    void propose(Code code, std::uint64_t seq);
    bool wishes_now() const;  // a proposal that the next vote can answer: not one for a queued operation
    void freeze(bool before_vote = true);
    bool settle_run();
    Vote build_vote() const;
    void send_vote(bool calls = false);  // calls: the leader may not know yet that there is something to vote on
    void send_vote_straight(int to, const Vote& vote);
    void on_vote(int rank, Vote vote);
    void on_freeze(std::uint32_t attempt);
    void look_again();
    void try_decide();
    bool outdated(const Decision& d) const { return d.admissions < since_; }
    bool excludes_this_rank(const Decision& d) const {
        return d.attempt > attempt_ ? !d.alive.has(rank_) : d.agree_seq > decision_.agree_seq && !d.agree_survivors.has(rank_);
    }
    void on_excluded();
    void on_decide_reply(CellClient::Result result, const Bytes& value, const Bytes& mine);
    void adopt(const Bytes& record);
    void take_agreed(const Decision& d, const Bytes& record);  // nothing else of it
    void apply(const Decision& d);
    void apply_plans();
    void read_cell();
    int slot_of(int rank) const { return spec_.members[static_cast<std::size_t>(rank)]; }
    int rank_of_slot(int slot) const { return rank_of_slot_[static_cast<std::size_t>(slot)]; }  // -1: none
    int leader() const { return voters().lowest(); }
    const RankSet& in_view() const;  // ranks whose incarnation is alive in the job view
    RankSet voters() const { return decision_.alive & in_view(); }
    std::map<int, Evidence> evidence() const;
    Bytes spec_and(const Bytes& rest) const;
    FrameHeader control(FrameKind kind) const;
    std::string cell_key() const;

    class Announcements;  // announce.h
    class VoteTree;  // vote_tree.h
    class Agreeing;  // agree.h

    // replay.cc: the policy replay
    bool replays() const { return pairs_ != nullptr; }
    LogKey note_key(int what) const { return {spec_.id, core_.self(), what}; }  // what this rank notes for its replacement
    void begin_replay();
    std::unique_ptr<LoggedPairs> make_pairs(LoggedPairs::Channel channel);
    LoggedRing& ring();
    template <class F>
    void for_pairs(const F& f) {
        f(*pairs_);
        if (ring_ == nullptr) return;
        f(ring_->pairs());
        ring_->pump();
    }
    bool log_result(const OpState& op) override;
    bool begin_share(const OpState& op) override { return results_->begin_share(op); }
    bool put_in_share(ByteView piece) override { return results_->put_in_share(piece); }
    Status view_share(const OpState& op, int rank, std::uint64_t at, std::uint64_t bytes, Log::View* out) override {
        return results_->view_share(op, rank, at, bytes, out);
    }
    void log_failure(const OpState& op, const Status& status);
    Status find_what_is_logged();
    void learn_complete(const Decision& d);
    void serve_logged();
    LastResult last_from_log(std::uint64_t seq);
    void keep_in_log();  // the last operation's result
    std::uint64_t logged_whole() const;
    bool present() const;  // every member is in the view, or has left for good
    bool anybody_left() const;
    void give_up_on_the_dead(Code why);
    void on_view_replay();
    void start_after_admissions();
    void on_returned(const RankSet& came);
    void caught_up();

    // restore.h, lost_logs.h: the policy replay, where a log is lost
    class Restore;
    class LostLogs;
    void on_restored();
    Status find_what_was_heard();
    void read_log();

    void fail_everything(const Status& status);
    void fail_messages(const Status& status);

    Core& core_;
    CommSpec spec_;
    Status disputed_;  // why it is of no use, or ok
    bool claimed_;
    bool closed_ = false;
    const std::vector<int> rank_of_slot_;
    const int rank_;
    std::vector<std::uint32_t> incarnations_;
    mutable RankSet in_view_;
    mutable std::optional<std::uint64_t> in_view_epoch_;  // of in_view_; none: to be worked out
    PointToPoint p2p_;
    std::unique_ptr<PhasedLog> log_;  // replay
    std::unique_ptr<LoggedPairs> pairs_;  // replay: in its place
    std::unique_ptr<LoggedRing> ring_;  // replay: once somebody has used it
    std::unique_ptr<ResultStream> results_;  // replay
    std::unique_ptr<Checkpoints> checkpoints_;  // replay
    std::unique_ptr<LostLogs> lost_logs_;  // replay
    std::unique_ptr<Restore> restore_;  // replay: as long as this rank's log is not here
    RankSet acked_;  // failures the user knows of
    std::vector<int> known_failed_;  // as failed(), in the order in which this rank has heard of them

    std::uint64_t next_seq_ = 1, done_seq_ = 0;
    std::deque<std::unique_ptr<OpState>> open_;  // posted, the first may be under way
    std::unique_ptr<OpState> spare_op_;  // one that is over, for its memory
    std::deque<std::unique_ptr<OpState>> helpers_;  // hand-outs of a kept result; they come first
    FlatRoom flat_rooms_[2];  // of flat runs, in turn
    int next_room_ = 0;
    std::vector<int> living_;  // living_set_, as a list
    RankSet living_set_;
    Calls calls_;
    Board board_;  // of runs by windows, and
    Posts posts_;  // of flat ones
    Ways ways_;
    bool looks_ = false;  // the last of these did, or does
    bool after_flat_ = false;  // the run before, too, was a flat one
    std::unique_ptr<Run> run_;
    std::unique_ptr<Run> idle_flat_;  // one that is over, for its memory
    LastResult last_;
    SeqRuns unrun_;  // the latest that failed at once, for a dead root: a peer that runs one has called something else
    std::uint64_t held_from_ = 1;  // during an admission operations from here on wait (M13)
    std::deque<Stashed> stash_;  // frames of operations or attempts that are not here yet
    bool pumping_ = false;

    std::uint32_t attempt_ = 0;
    bool frozen_ = false;
    bool freeze_sent_ = false;
    std::uint32_t asked_ = 0;  // the highest attempt that a leader has asked a vote for
    bool cas_busy_ = false;
    bool excluded_ = false;  // others have decided without this rank: the view that says so is on its way
    bool cell_reading_ = false, read_again_ = false;
    Decision decision_;  // the newest applied
    Bytes record_;  // the cell's content as last known
    std::uint64_t since_ = 0;  // the last admission that let somebody into this communicator
    Bytes ahead_;  // a record from after an admission that this rank has not heard of yet
    Ballot ballot_;
    std::vector<Proposal> proposals_;
    std::unique_ptr<Announcements> announcements_;
    std::unique_ptr<VoteTree> vote_tree_;
    std::unique_ptr<Agreeing> agreeing_;

    // replay
    std::uint64_t logged_ = 0;  // the last of this rank's results in the log, of this process or one before it
    std::uint64_t served_ = 0;  // operations up to here are complete everywhere: a process that runs again gets them from the log
    std::uint64_t inherited_ = 0;  // results up to here were in the log when this process began
    std::optional<FailureLog> failures_;
    std::uint64_t replayed_ = 0;  // so many were
    bool catching_up_ = false;  // until the first operation that is not in the log
    Time patience_ = 0;  // with the dead, until then: an operation's own timeout may be shorter than a process takes to start
    Status log_error_;  // a result that could not be logged
};

}  // namespace ftcomm
