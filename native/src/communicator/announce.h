// What goes from one rank to many, and what comes from a view that this rank has not got yet.
//
// Records that one rank has for many (decisions, results of agree and shrink, the call to vote) go along a tree (channel/spread.h). What does
// not come through, because a rank on the way has died, is asked for: its death changes the view, all who wait vote again then, and whoever has
// the record answers a vote that comes too late with it. Votes come up a tree of the same form, and count in the view that they were sent in (M17).
#pragma once

#include <vector>

#include "communicator/communicator.h"

namespace ftcomm {

class Communicator::Announcements {
public:
    explicit Announcements(Communicator& comm) : comm_(comm), core_(comm.core_) {}

    // To those who wait for it, in the tree: they have this communicator, for they have voted. Others in the view may not have made it yet.
    void announce(const Bytes& record, FrameKind kind);
    void spread_to(const RankSet& ranks, FrameKind kind, ByteView record);
    // Whom the sender knows, this rank knows only once it has the same view: then it has links to all of them, or they are out.
    void pass_on(const FrameHeader& header, const RankSet& slots, ByteView record);
    // To a vote that comes too late: its sender has missed the record.
    void answer(int rank, FrameKind kind);

    // Votes that come along a tree: those after a death, and those for an agree.
    void send_votes(int to, FrameKind kind, const Bytes& votes);
    // M17. False: they are kept until this rank has their view, or their sender is told this one, and sends them again.
    bool are_of_this_view(int from, FrameKind kind, std::uint64_t epoch, ByteView votes);

    void on_view();  // what was kept until then may go on
    void on_tick();
    bool idle() const { return votes_.empty() && records_.empty(); }

private:
    struct HeldVotes {
        int from;
        FrameKind kind;
        std::uint64_t epoch;
        Bytes body;
    };
    struct HeldRecord {  // to be passed on
        FrameHeader header;
        RankSet slots;
        Bytes record;
    };

    Communicator& comm_;
    Core& core_;
    std::vector<HeldVotes> votes_;
    std::vector<HeldRecord> records_;  // both from after a change of the view that has not come here
    bool held_at_tick_ = false;
};

}  // namespace ftcomm
