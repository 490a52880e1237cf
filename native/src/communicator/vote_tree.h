// How the votes after a death come to the leader where voters are many: as those for an agree (agree_votes.cc), along the tree of a view, each
// rank's with those of all that are below it, and in the view that they were sent in (M17). Who wishes for something, or has found out that others
// do something else, sends its vote straight to the leader as well, which may not know yet that there is something to decide.
//
// Who waits for those below for long does so, too, with what it has: they may not have made the communicator, and the leader calls them. (Where
// all know of a death from the view, nobody waits.) Under replay votes go straight: a rank that asks for its lost log takes its vote back.
#pragma once

#include <utility>

#include "communicator/communicator.h"

namespace ftcomm {

class Communicator::VoteTree {
public:
    explicit VoteTree(Communicator& comm) : comm_(comm), core_(comm.core_) {}

    bool is_used() const;
    void on_freeze() { frozen_ticks_ = 0; }
    void send_on();  // this rank's votes and those from below, once all of them are here
    void on_votes(int from, std::uint64_t epoch, ByteView body);
    void on_tick();

private:
    using Round = std::pair<std::uint64_t, std::uint32_t>;  // in which epoch, for which attempt

    Round now() const { return {core_.view.epoch, comm_.attempt_ + 1}; }
    bool has_vote_of_this_view(int rank) const;
    void send(int to, const RankSet& ranks);

    Communicator& comm_;
    Core& core_;
    Round sent_, waited_;
    int waited_ticks_ = 0, frozen_ticks_ = 0;
};

}  // namespace ftcomm
