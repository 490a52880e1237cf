// What is written down about a communicator: votes, plans, and the decision in its head cell.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "collectives/seq_runs.h"
#include "communicator/node.h"
#include "communicator/request.h"

namespace ftcomm {

// What an operation is, as far as ranks must agree on it. Its hash is the signature in every frame (C8: with the algorithm).
struct Shape {
    OpKind kind = OpKind::Barrier;
    DType dtype = DType::UInt8;
    ReduceOp op = ReduceOp::Sum;
    Algorithm algorithm = Algorithm::Ring;
    std::int32_t root = 0;
    std::uint64_t count = 0;     // 0 where ranks may differ (gather, scatter, all_to_all with counts)
    double factor = 1.0;
    std::uint32_t blocks = 0;    // the grid
    std::uint32_t per_block = 0;

    bool operator==(const Shape& o) const {
        return kind == o.kind && dtype == o.dtype && op == o.op && algorithm == o.algorithm && root == o.root &&
               count == o.count && OpDesc::same_factor(factor, o.factor) && blocks == o.blocks && per_block == o.per_block;
    }
    std::uint64_t signature() const;
    std::string text() const;    // "all_reduce(float32[1024], sum)"
    void encode(ByteWriter& w) const;
    static Shape decode(ByteReader& r);
    // What its ranks do. A small sum is made by all of them, and the parts of a small all-to-all come to all of them, whoever of them has called
    // for what of it (OpState::Part): so each can hand it to one that lacks it, as of an all-reduce and an all-gather (C6).
    OpKind runs_as() const {
        if (algorithm != Algorithm::Flat) return kind;
        return reduces(kind) ? OpKind::AllReduce : kind == OpKind::AllToAll ? OpKind::AllGather : kind;
    }
    bool is_direct() const {
        return kind == OpKind::Gather || kind == OpKind::Scatter || (kind == OpKind::AllToAll && algorithm != Algorithm::Flat);
    }
    Shape directly() const {  // of an all-to-all
        Shape s = *this;
        s.algorithm = Algorithm::Direct;
        s.count = 0;
        s.blocks = 1;
        s.per_block = 0;
        return s;
    }
    // A small all-to-all as here, called without counts, and one of the same type that goes from rank to rank: its pairs know what they expect.
    bool is_same_exchange(const Shape& direct) const {
        return kind == OpKind::AllToAll && algorithm != Algorithm::Direct && direct == directly();
    }
    // Whether finals go to all; else each stays where it was reduced.
    bool shares_finals() const { return runs_as() != OpKind::Reduce && runs_as() != OpKind::ReduceScatter; }
    bool has_root() const {
        return kind == OpKind::Broadcast || kind == OpKind::Reduce || kind == OpKind::Gather || kind == OpKind::Scatter;
    }
};

enum class LabelKind : std::uint8_t { Empty = 0, Input = 1, Final = 2 };

// A run of equal labels over consecutive segments.
struct LabelRun {
    std::uint32_t count = 0;
    LabelKind kind = LabelKind::Empty;
    RankSet contributors;  // Final only (C2)
};

struct OpVote {
    enum class State : std::uint8_t { Open = 1, Complete = 2, Failed = 3 };
    std::uint64_t seq = 0;
    State state = State::Open;
    bool retained = false;      // Complete without a fence: the result is kept and can be handed out (C6)
    Shape shape;
    std::vector<LabelRun> labels;
};

// A rank's wish to fail one operation, or the communicator (seq 0: revoke). It is only a wish: the vote decides (C7).
struct Proposal {
    Code code = Code::Ok;
    std::uint64_t seq = 0;
};
inline constexpr auto kUnreadable =
    Code::System;      // it could not read a peer's memory: it does not wish for an error if frames may do
inline constexpr auto kNoWindow = Code::Unsupported;  // it had no room for a window: it wishes to do without, and for no error

// An error as all ranks shall see it.
struct Cause {
    Code code = Code::Ok;
    std::string message;
    std::vector<std::int32_t> ranks;
    std::vector<Evidence> evidence;
    std::uint64_t epoch = 0;

    void encode(ByteWriter& w) const;
    static Cause decode(ByteReader& r);
    static Cause of(const Status& status);
    Status status(const std::string& operation) const;
};

// Replay: an operation that all saw fail, or shall.
struct Failure {
    std::uint64_t seq = 0;
    Cause cause;
};

// Attempts after the nth admission begin here, whoever counted how far before (M8): no vote or frame from before it can be taken for one after.
inline std::uint32_t first_attempt(std::uint64_t admissions) {
    constexpr std::uint32_t kAttempts = 1u << 16;
    FT_CHECK(admissions < ~std::uint32_t{0} / kAttempts, "admission %llu", static_cast<unsigned long long>(admissions));
    return static_cast<std::uint32_t>(admissions) * kAttempts;
}

struct Vote {
    std::uint32_t attempt = 0;   // proposed
    std::uint64_t done_seq = 0;
    std::uint64_t logged = 0;    // replay: this rank's results up to here are in its log, complete elsewhere or not
    std::uint64_t known_done = 0;  // replay: by the decision before, somebody has returned from the operations up to here
    std::uint64_t inherited =
        0;  // replay: a process before this one has logged the results up to here, and may have returned them
    std::uint64_t revoked_from = ~std::uint64_t{0};  // replay
    std::vector<Failure> failures;  // replay: as far as this rank knows
    std::vector<OpVote> ops;     // last finished, then the open one
    SeqRuns unrun;               // finished here without having run, for their root is dead
    std::vector<Proposal> proposals;
    std::vector<std::uint32_t> log_since;  // replay: as in a decision, as far as this rank knows
    std::uint64_t view_epoch = 0;

    void encode(ByteWriter& w) const;
    static std::optional<Vote> decode(ByteReader& r);
};

enum class SegmentMode : std::uint8_t { None = 0, Reduce = 1, Gather = 2, Absent = 3 };

struct SegmentRun {
    std::uint32_t count = 0;
    SegmentMode mode = SegmentMode::None;
    std::int32_t rank = 0;       // owner or holder (communicator rank)
    RankSet contributors;
};

struct OpPlan {
    enum class Verdict : std::uint8_t { Complete = 1, Fail = 2, Repair = 3 };
    std::uint64_t seq = 0;
    Verdict verdict = Verdict::Complete;
    bool settled = false;            // Repair of what a rank has returned from: no wish to fail it counts any more (C7)
    Cause cause;                     // Fail
    Shape shape;                     // Repair
    std::vector<SegmentRun> runs;    // Repair, Complete (contributors)
};

struct Decision {
    std::uint32_t attempt = 0;
    std::uint64_t nonce = 0;
    std::uint64_t epoch = 0;         // job epoch it was made in
    std::uint64_t admissions = 0;  // and after how many admissions: records of members since replaced are no decisions any more
    RankSet alive;  // communicator ranks
    // Until replacements come in (under replay: until the rank that leads is one):
    bool frames_only = false;  // the kernel refused to read a living rank's memory
    bool no_windows = false;  // a rank had no room for one
    bool revoked = false;
    std::uint64_t revoked_from = ~std::uint64_t{0};  // the first operation that nobody had entered then: from there on Revoked
    std::uint64_t fail_from = ~std::uint64_t{0};  // operations from here on fail with `cause`
    Cause cause;
    std::vector<OpPlan> plans;
    std::vector<Failure> failures;  // replay: of this decision, and all before it
    std::uint64_t done_through = 0;  // somebody has returned from the operations up to here: what the log has of them holds
    // Replay, by rank: the incarnation that began the rank's log, after one before it was lost. Empty: all are the first.
    std::vector<std::uint32_t> log_since;
    // agree and shrink: the last result
    std::uint64_t agree_seq = 0;
    std::int64_t agree_value = 0;
    Cause agree_cause;  // unacknowledged failures, mismatch
    RankSet agree_survivors;

    const OpPlan* plan_for(std::uint64_t seq) const;
    Bytes encode() const;
    static std::optional<Decision> decode(ByteView data);
};

void encode_failures(ByteWriter& w, const std::vector<Failure>& failures);
std::vector<Failure> decode_failures(ByteReader& r);
void encode_spec(ByteWriter& w, const CommSpec& spec);
CommSpec decode_spec(ByteReader& r);

}  // namespace ftcomm
