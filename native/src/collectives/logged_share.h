// Finals of an all-reduce in their owners' logs (replay): what a rank owns goes into its log anyway, piece by piece as it becomes final, and
// the others copy it from there to where their input is (the ring), or could, should reading the owner's memory break off (pull).
//
// Invariant B holds though the input is overwritten: what has been seen in a log stays as it is to the end of the attempt, whoever dies, as
// nobody writes there before a vote that the reader takes part in has ended that. It can be found no longer than its owner lives,
// though, or holds on to the attempt: so who is about to lose an input looks it up before.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/run.h"

namespace ftcomm {

class LoggedShare {
public:
    LoggedShare(const RunEnv& env, OpState& op) : env_(env), op_(op) {}

    // Before the run's first frame. Only where all segments are reduced now, by all members: then what each rank logs is what it owns.
    void begin(const std::vector<SegmentRun>& plan);
    // The next `segments` of what this rank owns are final, from s on: in their place, or for now at `from`. True: the others can see them
    // in the log; false: not these, nor any that come later.
    bool put(std::uint32_t s, std::uint32_t segments) { return put(s, segments, op_.result(s)); }
    bool put(std::uint32_t s, std::uint32_t segments, const std::byte* from);
    // The same of another rank, which has said so. False: that rank is gone, or this process cannot map its log.
    bool find(int owner, std::uint32_t s, std::uint32_t segments);
    // What was just found, to where this rank's input is. False: something else was there, as this rank was voted out meanwhile.
    bool take(std::uint32_t s);

private:
    std::size_t bytes(std::uint32_t s, std::uint32_t segments) const;

    const RunEnv& env_;
    OpState& op_;
    std::vector<std::uint32_t> first_;  // segment of each rank's; empty: not begun
    std::uint32_t next_ = 0;  // that this rank puts
    bool on_ = false;
    Log::View found_;
};

}  // namespace ftcomm
