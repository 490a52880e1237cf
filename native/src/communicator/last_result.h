// The operation that finished last: what a vote says of it, and its result while nobody else may have it (C6).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/op_state.h"
#include "collectives/records.h"
#include "collectives/run.h"

namespace ftcomm {

struct LastResult {
    std::uint64_t seq = 0;
    OpVote::State state = OpVote::State::Complete;
    Shape shape;
    OpDesc desc;
    Grid grid;
    std::vector<LabelRun> labels;
    const FlatRoom* flat = nullptr;  // where it lies, if it had no fence
    std::shared_ptr<Bytes> kept;
    bool logged = false;  // replay: in the log, here or shared out among the ranks of this host

    // Another one has finished. What desc says matters only where `logged`, `flat` or `kept` say that there is a result.
    void begin(std::uint64_t seq_in, OpVote::State state_in, const OpState& op) {
        seq = seq_in;
        state = state_in;
        shape = op.shape;
        grid = op.grid;
        labels.clear();
        flat = nullptr;
        if (kept != nullptr) kept = nullptr;
        logged = false;
    }
    bool is_in_memory() const { return kept != nullptr || flat != nullptr; }
    void keep(const std::byte* result, std::size_t members);  // a copy of it
    void keep_apart(std::size_t members);  // from the memory of flat runs, which others use next
    // For those who turn out to lack it; the result is `kept`.
    std::unique_ptr<OpState> hand_out(int rank, std::uint64_t signature) const;
};

}  // namespace ftcomm
