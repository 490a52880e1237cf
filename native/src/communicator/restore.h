// A replacement that starts without its predecessor's log: on another host, or on a disk that is empty now. Before it takes part in
// anything it gets back, from the other ranks, what they have of it: its halves of the messages (between hosts each side has one), and the
// results that all ranks get. Then it is a replacement like any other, with a log in which nothing is missing, or it says what is.
//
// The others wait meanwhile: a communicator with a member that is back is frozen until that member has voted, and this one votes last. So what
// they have does not change under its eyes. They keep nothing of this: each question says all that its answer needs, and whoever dies on
// either side is asked again, or asks again, from where the new log ends.
//
// What only the lost log had cannot be had again. Most of it is known to the others all the same: which results are of kinds that differ by
// rank (their records say), and that a receive was told something that depends on time (LogAnswered goes to all others before that can be
// seen in anything else). Messages to itself are sent again. Failures come with the votes.
#pragma once

#include <optional>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/mark.h"
#include "communicator/restore_records.h"

namespace ftcomm {

class Communicator::Restore {
public:
    explicit Restore(Communicator& comm);

    void on_view();  // asks whoever is there and has not been asked
    void on_reply(int rank, ByteView body);
    void keep(int rank, const FrameHeader& header, ByteView payload);  // a frame for when the log is back
    void wait(const RequestPtr& request) { waiting_.push_back(request); }
    void fail(const Status& status);
    std::uint64_t progress() const { return records_; }

    std::vector<RequestPtr> take_waiting() { return std::exchange(waiting_, {}); }
    std::vector<Stashed> take_frames() { return std::exchange(frames_, {}); }

private:
    struct Copy {  // of a stream's part, from one rank
        LostStream stream;
        std::uint8_t part;
        LogKey to;
        std::uint64_t skip, through;  // in that part
        std::uint64_t arrived = 0;  // bytes of the record that is coming
    };
    struct Peer {
        std::uint32_t asked = ~0u;  // incarnation
        std::optional<RestoreState> state;
        std::vector<Copy> copies;
        std::size_t at = 0;
    };
    using Marks = std::vector<std::vector<Mark>>;  // by rank, then number

    int size() const { return static_cast<int>(peers_.size()); }
    Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
    Log& log() { return *comm_.core_.config.log; }
    void ask(int rank, const RestoreAsk& ask);
    void on_state(int rank, RestoreState state);
    void next(int rank);
    void end();
    void on_records(int rank, const RestoreAsk& asked, ByteReader& r);
    Status put(Copy& copy, const RestoredPiece& piece);
    bool is_lost(std::int64_t tag, ByteView head) const;
    std::string lost_both(int rank) const;
    void refuse(const std::string& what);
    void refuse(Status status);

    // restore_plan.cc
    Status plan();
    Status check_others_that_lost();
    Status find_marks(std::uint64_t* oldest, std::uint64_t* newest, Mark* base);
    Status plan_messages(int rank, const Mark* base, const Mark* oldest);
    Status check_fellow(int rank);
    Status finish();
    Status check_own_messages();
    Mark mark_at(std::uint64_t number) const;

    Communicator& comm_;
    std::vector<Peer> peers_;
    bool planned_ = false;
    int source_ = -1;  // of the results
    std::uint64_t complete_ = 0;  // results up to here are complete
    std::uint64_t first_mark_ = 0, last_mark_ = 0;  // that all ranks have; 0: none
    std::uint64_t base_seq_ = 0;  // results before the resume point
    std::uint64_t records_ = 0;
    std::vector<RequestPtr> waiting_;
    std::vector<Stashed> frames_;
};

}  // namespace ftcomm
