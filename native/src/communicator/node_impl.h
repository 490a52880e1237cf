// The parts of a node around its communicators: the job view (view_agent.cc, suspicion.cc), join and leave (join.cc), frames (node_impl.cc).
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "channel/late_log.h"
#include "communicator/communicator.h"
#include "communicator/core.h"

namespace ftcomm {

class NodeImpl {
public:
    NodeImpl(NodeConfig config, Transport& transport, Authority& authority, NodeHost& host, Time now);

    // node_impl.cc
    void on_frame(int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload);
    std::byte* place(int slot, std::uint32_t incarnation, const FrameHeader& header);
    void dispatch(int slot, const FrameHeader& header, ByteView payload);
    Status create_comm(const CommSpec& spec, bool claimed);  // claimed: by the user's call, not a peer's vote
    const Communicator* look_up(CommId id) const;
    Communicator* find(CommId id);
    void wake(Communicator& comm);
    std::map<CommId, std::unique_ptr<Communicator>>& all_awake();
    void let_rest();
    Communicator* find_or_make(CommId id, ByteView payload);
    void fail_all();  // voted out, or the authority is lost
    void on_writable(int slot);
    void work();
    void look();  // at what others show
    void settle();  // after every input: consequences that wait for a quiet moment
    void watch();  // and what is to be looked at from now on

    // view_agent.cc
    void on_evidence(int slot, std::uint32_t incarnation, Evidence evidence);
    void on_heard(int slot, std::uint32_t incarnation);  // suspicion.cc
    void on_tick();
    enum class ViewFrom : std::uint8_t { Winner, Cell, Peer };
    void apply_view(const Bytes& bytes, ViewFrom from, const RankSet& rest = {});
    void on_view_frame(ByteView payload);
    void propose_view();
    void reconsider_resets();
    void read_view(bool must);
    Time tick_interval() const { return core.config.heartbeat / 20; }

    // join.cc
    RequestPtr join_wait();
    RequestPtr admit();
    RequestPtr leave();
    void on_join_request(int slot, std::uint32_t incarnation);
    void on_admit_vote(int slot, ByteView payload);
    void on_leave(int slot, ByteView payload);
    void on_leave_ok(int slot);
    void on_goodbye(int slot);
    void on_admission(const RankSet& came, bool self_came);

    bool halted = false;  // the job is closed: nothing is heard any more
    LateLog late;  // replay: between the node and the log that it was given
    Core core;
    std::map<CommId, std::unique_ptr<Communicator>> comms;  // all that ever were: a vote may ask for one that is closed, too
    std::map<int, std::uint32_t> waiting;  // replacements that ask to come in: slot -> incarnation

private:
    struct Held {
        int slot;
        std::uint32_t incarnation;
        FrameHeader header;
        Bytes payload;
    };
    struct AdmitVote {
        std::uint64_t admissions = 0;
        std::map<int, std::uint32_t> waiting;
        std::vector<AdmitEntry> table;
    };

    // suspicion.cc
    RankSet ripe_suspects(std::map<int, Evidence>* why);
    bool same_host(int a, int b) const;
    std::map<int, Evidence> removals_due();
    void add_groups(std::map<int, Evidence>* due) const;
    void suspected(int slot, Evidence evidence, Time silence);

    // view_agent.cc
    void compare_and_set_view(const JobView& desired);
    void tell_view(const RankSet& to);  // the one that this rank has, to nobody else
    void spread_view(const Bytes& view, const RankSet& to);
    RankSet some_after_self(const RankSet& slots) const;

    // join.cc
    void send_admit_vote();
    void try_admit();
    void restart_timers(const JobView* before_deaths = nullptr);  // the view before, where it has only lost members since
    void tell_progress();
    void admit_returned();
    void begin_leave();
    void send_leave(const RankSet& to);
    bool nobody_missing() const;
    bool replays() const { return core.config.log != nullptr; }
    void send_join_requests();
    bool nobody_left_to_join() const;
    void give_up_joining();
    void answer_leavers();
    void check_leave_done();
    bool leave_overdue() const;
    Time leave_timeout() const { return core.config.leave_timeout > 0 ? core.config.leave_timeout : 2 * core.config.heartbeat; }
    struct LeaverAt {  // what it has finished in a communicator
        CommId comm;
        std::uint64_t done, agreed;
    };
    bool satisfied(const std::vector<LeaverAt>& leaver) const;

    std::vector<Time> heard_;
    Time last_tick_;
    struct Reset {
        Time first, last;  // evidence, with nothing heard between
    };
    std::map<int, Reset> reset_;
    std::map<int, Evidence> confirmed_;  // of the slots' current incarnations
    RankSet reported_;  // suspicion event sent
    struct EarlyDeath {
        std::uint32_t incarnation;
        Evidence evidence;
    };
    std::map<int, EarlyDeath> dead_early_;  // replacements that died before this rank saw them come in
    bool view_busy_ = false, view_reading_ = false;
    Bytes proposed_view_;  // the last one that this rank has asked for
    bool dead_end_done_ = false;

    // Not those that are closed and at rest, of which a long run may have thousands.
    std::vector<Communicator*> active_;
    std::size_t next_writable_ = 0;  // of active_
    std::vector<Transport::Word> words_;  // that are watched
    std::map<CommId, std::vector<Held>> unknown_;  // frames of communicators that are not made here yet
    std::vector<Held> early_;  // frames of incarnations that this rank has not seen admitted yet
    std::map<int, Bytes> partial_;  // long control messages being put together

    RequestPtr join_request_, admit_request_, leave_request_;
    bool admit_voted_ = false;
    struct Admission {  // that this rank has seen, for communicators that it makes later
        std::uint64_t number;
        RankSet newcomers, alive;
        std::vector<AdmitEntry> table;
    };
    std::vector<Admission> admissions_;
    std::map<int, AdmitVote> admit_votes_;
    Time next_join_request_ = 0;
    std::uint64_t told_progress_ = 0;  // replay: of all communicators
    Time next_progress_ = 0;
    std::map<int, std::vector<LeaverAt>> leavers_;  // not answered yet
    RankSet leave_ok_;
    bool leave_sent_ = false, goodbye_sent_ = false;
    bool ended_ = false;  // replay: somebody has said goodbye, so all had come to their end
    Time leave_deadline_ = 0;
    Time last_leave_deadline_ = 0;  // however long votes last
};

}  // namespace ftcomm
