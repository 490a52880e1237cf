// Which way an operation goes, of those that there are. C8: the same on all ranks of an attempt, as it follows from the operation, from the
// decision, and from what never changes of those in it.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/board.h"
#include "collectives/op_state.h"
#include "collectives/plan.h"
#include "communicator/calls.h"

namespace ftcomm {

enum class Way : std::uint8_t { Exchange, Direct, FlatTree, Flat, Stage, Blocks, Pull, Groups, Ring };

class Ways {
public:
    // All of them the communicator's, and there as long as this is.
    Ways(const Core& core, const CommSpec& spec, int rank, const Calls& calls, const Decision& decision, const Board& board)
        : core_(core), spec_(spec), rank_(rank), calls_(calls), decision_(decision), board_(board) {}

    struct Now {
        const std::vector<int>& living;
        bool repair = false;
        bool flat = false;  // it runs as a flat one
        bool after_flat = false;  // and so did the one before
    };
    struct Choice {
        Way way;
        bool near = false;  // all share memory
        bool reads = false;  // out of each other's memory: all ranks if near, else those of a host
        bool straight = false;  // Flat, for what all show: else it would go along a tree
    };
    Choice choose(const OpState& op, const std::vector<SegmentRun>& plan, const Now& now) const;

    // Bytes of a message of a direct one from which on it is shown to be read; of what a rank shows of a flat one, at most.
    std::uint64_t show_limit(OpKind kind) const;
    std::uint64_t post_limit(OpKind kind) const;
    bool may_show(const Now& now) const;

private:
    bool replays() const { return spec_.policy == Policy::Replay; }
    bool goes_straight(const OpState& op, const Now& now) const;
    bool reads_memory(const OpState& op, bool near) const;
    bool stages(const OpState& op, bool near, const Now& now) const;
    bool goes_by_tree(const OpState& op, const Now& now) const;
    bool all_share_memory() const;

    const Core& core_;
    const CommSpec& spec_;
    const int rank_;
    const Calls& calls_;
    const Decision& decision_;
    const Board& board_;
};

}  // namespace ftcomm
