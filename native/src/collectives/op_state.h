// One rank's share of one operation: what was called, where the bytes are, and what each segment holds now.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/fault_tolerance.h"
#include "collectives/grid.h"
#include "collectives/own_part.h"
#include "collectives/records.h"
#include "communicator/request.h"

namespace ftcomm {

// The label that a rank which has not entered would start with.
LabelKind initial_label(const Shape& shape, int rank, std::uint32_t block);

class OpState {
public:
    OpState() = default;
    OpState(std::uint64_t seq, const OpDesc& desc, const Shape& shape, Grid grid, int rank, std::uint64_t signature,
            RequestPtr request) {
        begin(seq, desc, shape, grid, rank, signature, std::move(request));
    }
    // In the memory of one that is over: as new.
    void begin(std::uint64_t seq, const OpDesc& desc, const Shape& shape, Grid grid, int rank, std::uint64_t signature,
               RequestPtr request);

    std::uint64_t seq = 0;         // fixed once started; an admission renumbers those that wait for it
    // From begin() on they stay as they are (but for desc.recv of a part).
    OpDesc desc;
    Shape shape;
    std::uint64_t signature = 0;
    Grid grid;
    RequestPtr request;            // null: a helper that hands out a kept result
    Time timeout = 0, deadline = 0;
    bool started = false;          // runs in this attempt
    bool entered = false;          // has started in some attempt: labels may say more than the default (C5)
    bool ran = false;              // frames were exchanged for it
    bool timeout_proposed = false;
    RankSet team;                  // the living of the attempt that it last ran in
    std::uint32_t repairs = 0;     // how many repair plans it went through
    std::shared_ptr<Bytes> kept;   // helper: the kept result that desc points into

    // Of what all make or get, and of which this rank's caller has asked for a part (Shape::runs_as): desc is that of the all-reduce or
    // all-gather, and desc.recv where its result is: in the run's memory, or in its own (null: it has not begun). The caller's is only read
    // until the end.
    bool is_part() const { return shape.runs_as() != shape.kind && request != nullptr; }
    void make_room();  // for what is not made in one step
    // An all-gather's input to where the results go, if it is not there; up to so many bytes at once. Not before the operations before it are
    // done: it may be their result. (The label is that of a final from the start: see Run::brings_in.)
    void bring_in(std::uint64_t most = ~std::uint64_t{0}) { own_.copy(most); }
    const OwnPart& own() const { return own_; }
    void give();
    void go_directly(std::uint64_t signature_in);  // Shape::directly; nothing has been given yet

    // Invariant B: segment s of the result buffer is wholly what its label says.
    LabelKind label(std::uint32_t s) const {
        if constexpr (!kFaultTolerant) return initial_label(shape, rank_, grid.block_of(s));  // no run asks a second time
        return labels_[s] < 2 ? static_cast<LabelKind>(labels_[s]) : LabelKind::Final;
    }
    const RankSet& contributors(std::uint32_t s) const { return sets_[static_cast<std::size_t>(labels_[s]) - 2]; }
    void set_final(std::uint32_t s, const RankSet& contributors);
    // Before something is written over an input that may break off: where the operation then fails anyway.
    void set_lost(std::uint32_t s);
    void set_absent(std::uint32_t s);  // a block of a rank that is out: zeros, final, and nobody contributed
    bool all_final() const;
    std::vector<LabelRun> label_runs() const;
    void label_runs(std::vector<LabelRun>* runs) const;
    void outcome(int rank, const RankSet& alive, std::uint64_t epoch, Outcome* out) const;

    // Where segment s is read from (this rank's input) and written to (its final); nullptr where this rank has none.
    const std::byte* input(std::uint32_t s) const;
    const std::byte* input() const;  // of the first one, also where there is none
    std::byte* result(std::uint32_t s) const;
    std::uint32_t segment_bytes(std::uint32_t s) const { return static_cast<std::uint32_t>(grid.count(s) * size_of(desc.dtype)); }

private:
    struct Part {
        void* to = nullptr;  // null: this rank asked for nothing
        std::uint64_t offset = 0, count = 0;  // elements of each block
    };
    void run_as_whole();
    int rank_ = 0;
    Part part_;
    OwnPart own_;  // of an all-gather
    Bytes room_;
    std::vector<std::uint16_t> labels_;  // 0 empty, 1 input, 2 + index into sets_
    std::vector<RankSet> sets_;
};

}  // namespace ftcomm
