// What a caller posts and what it gets back.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/rank_set.h"
#include "base/status.h"

namespace ftcomm {

using CommId = std::uint64_t;
using Time = std::int64_t;  // nanoseconds of a monotonic clock

enum class OpKind : std::uint8_t {
    AllReduce = 0,
    Broadcast = 1,
    Reduce = 2,
    AllGather = 3,
    ReduceScatter = 4,
    Gather = 5,
    Scatter = 6,
    AllToAll = 7,
    Barrier = 8,
};
const char* to_string(OpKind kind);
inline bool reduces(OpKind k) { return k == OpKind::AllReduce || k == OpKind::Reduce || k == OpKind::ReduceScatter; }
// All have the same afterwards, and nothing is summed.
inline bool gathers(OpKind k) { return k == OpKind::AllGather || k == OpKind::Broadcast || k == OpKind::Barrier; }

// Of a call: Auto, Ring, Flat, and under the policy replay RingLogged (logged_ring.h). Of an operation (Shape): Auto is the ring, or pulls where all members share memory.
enum class Algorithm : std::uint8_t { Auto = 0, Ring = 1, Flat = 2, Direct = 3, RingLogged = 4 };

enum class Policy : std::uint8_t { Raise = 0, Lossy = 1, Replay = 2 };
inline const char* to_string(Policy p) { return p == Policy::Raise ? "raise" : p == Policy::Lossy ? "lossy" : "replay"; }

// Elements for each rank and where they begin, on the sending and on the receiving side. Empty: `count` elements for each peer, packed.
struct PerRank {
    std::vector<std::uint64_t> send_counts, send_offsets, recv_counts, recv_offsets;
};
inline const PerRank kPacked;

// One collective call of one rank. Buffers stay the caller's and must live until the request is done.
//   all_reduce      recv[count] in place                      broadcast  recv[count] (root: its data)
//   reduce          send[count], root: recv[count] (may be send)
//   all_gather      send[count] -> recv[size * count]         reduce_scatter  send[size * count] -> recv[count]
//   gather/scatter  send_counts / recv_counts, displacements in elements, on the root's side
//   all_to_all      both; empty vectors mean `count` elements for each peer, packed
struct OpDesc {
    OpKind kind = OpKind::Barrier;
    DType dtype = DType::UInt8;
    ReduceOp op = ReduceOp::Sum;
    Algorithm algorithm = Algorithm::Auto;
    int root = 0;
    std::uint64_t count = 0;
    const void* send = nullptr;
    void* recv = nullptr;
    std::shared_ptr<const PerRank> layout;  // null: packed, as nearly all are
    double factor = 1.0;              // premul_sum
    Time timeout = 0;                 // 0: the communicator's default

    // By the bits, as it is sent and signed: -0.0 is another factor than 0.0.
    static bool same_factor(double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); }
    const PerRank& per_rank() const { return layout != nullptr ? *layout : kPacked; }
};

// Sources of a receive: from anyone. While a failure is not acknowledged, the first reports it and stays pending (ULFM), the second
// ends with it, also when nobody waits.
inline constexpr int kAny = -1, kAnyOrFail = -2;

struct Chunk {
    std::uint64_t offset = 0, count = 0;  // elements of the result
    RankSet contributors;
};

struct Outcome {
    RankSet contributors;        // intersection over all chunks
    std::vector<Chunk> chunks;   // adjacent, merged where contributors are equal
    std::uint64_t epoch = 0;     // job epoch when it completed
};

// Completed exactly once, by the engine. `done` is the only field another thread may read before it is set.
struct Request {
    // As new, in the memory of one that ended well.
    void begin() {
        status = {};
        outcome.contributors = {};
        outcome.chunks.clear();
        outcome.epoch = 0;
        source = -1;
        bytes = 0;
        value = 0;
        survivors = {};
        new_comm = 0;
        alarmed = false;
        alarm = {};
        if (on_done) on_done = nullptr;
        done.store(false, std::memory_order_relaxed);
    }
    std::atomic<bool> done{false};
    Status status;
    Outcome outcome;
    int source = -1;                   // receives: who sent
    std::uint64_t bytes = 0;           // receives: how much
    std::int64_t value = 0;            // agree: the flag
    RankSet survivors;                 // shrink, join: who is in
    CommId new_comm = 0;               // shrink
    // A receive from anyone while a failure is unacknowledged: waiting reports `alarm`, the request stays pending (ULFM).
    bool alarmed = false;
    Status alarm;
    std::function<void(Request&)> on_done;  // called by the engine's owner after it has let go of the engine
};
using RequestPtr = std::shared_ptr<Request>;

}  // namespace ftcomm
