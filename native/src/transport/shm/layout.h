// What lies where in a host's shared memory segment. Every structure is valid as zeroes (a fresh memfd) and is reached by
// offset: the segment is mapped at a different address in each process. No offset is ever handed out twice (M9): a removed
// rank may wake up in the middle of a memcpy, and then it can only hit memory that nobody reads any more.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/rank_set.h"
#include "base/streaming.h"

namespace ftcomm::shm {

using Offset = std::uint64_t;  // from the start of the segment; 0: none

inline constexpr std::uint64_t kMagic = 0x31534d4d4f435446ULL;      // "FTCOMMS1"
inline constexpr std::uint64_t kRingMagic = 0x31474e49524d5446ULL;  // "FTMRING1"
inline constexpr std::uint32_t kVersion = 7;
inline constexpr int kWords = kMaxRanks / 64;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "atomics in shared memory must be address-free");

inline constexpr std::uint32_t kInMemory = 1, kInStore = 2;

struct Header {
    std::uint64_t magic;
    std::uint32_t version;
    std::uint32_t world_size;
    std::uint64_t boot;
    std::uint64_t job;
    std::uint64_t size;
    std::uint32_t authority;                       // kInMemory or kInStore, written before anybody is let go
    alignas(128) std::atomic<std::uint64_t> used;  // everything below this offset is taken
};

// Fixed places, then the arena.
inline constexpr Offset kNewestAt = 4096;            // std::atomic<Offset>[world_size]: newest Instance of each slot
inline constexpr Offset kBucketsAt = 16384;          // std::atomic<Offset>[kBuckets]: cells by hash of their key
inline constexpr std::uint32_t kBuckets = 1u << 16;
inline constexpr Offset kArenaAt = 1u << 20;
static_assert(kNewestAt + 8ull * kMaxRanks <= kBucketsAt && kBucketsAt + 8ull * kBuckets <= kArenaAt);

// Who sleeps on a mailbox: a sender wakes exactly this one.
enum Sleeper : std::uint32_t { kAwake = 0, kProgress = 1, kDriver = 2 };

// Where others leave word for one process (unless it is `watching`). Senders: set the bit, then look at `sleeper`; the owner: set
// `sleeper`, then look at the bits. Both orders are sequentially consistent, so that one of the two sees the other.
struct alignas(128) Mailbox {
    std::atomic<std::uint32_t> sleeper;
    std::atomic<std::uint32_t> bell[2];  // futex words: of the progress thread, of a waiting user thread
    std::uint32_t unused;
    std::atomic<std::uint64_t> pending[kWords];   // by source slot: frames, or a new ring
    std::atomic<std::uint64_t> writable[kWords];  // by destination slot: its ring has room again
    // The owner looks at the rings themselves: frames need no bit, which would be one more line to fetch for both sides. Senders: write
    // the ring's head, then look at this; the owner: clear it, then look at the heads. Both orders are sequentially consistent.
    alignas(128) std::atomic<std::uint32_t> watching;
    // The owner waits for words in the windows of others (Transport::Word) at which it does not look, as there are too many: who changes one
    // leaves word also when it is awake.
    std::atomic<std::uint32_t> overlooks;
};

// One incarnation of one slot. Followed by std::atomic<Offset> inbound[world_size]: newest ring from each slot.
struct Instance {
    std::uint32_t slot;
    std::uint32_t incarnation;
    std::int32_t pid;
    std::uint32_t memory_domain;  // processes with the same one may read each other's memory; 0: not this one (peer_memory.h)
    std::uint64_t pid_namespace;
    Offset older;  // instance of the same slot, registered before
    std::atomic<Offset> windows;  // the newest of this incarnation's
    alignas(128) std::atomic<std::uint32_t> liveness;  // robust futex of the progress thread, see runtime/liveness.h
    alignas(128) std::atomic<std::uint64_t> ticks;
    Mailbox mailbox;
};

// The head of a window (Transport::kWindowHead). It stays when the rest goes, as a link of the chain.
struct WindowHead {
    std::atomic<std::uint64_t> ticket;  // its owner's, which falls before anything else is there
    Offset next;  // made before
    std::uint64_t bytes;
};

inline constexpr std::uint32_t kWrap = 0xffffffffu;  // in place of a frame's length: go on at the start of the ring

// One direction between two incarnations. Followed by `capacity` bytes.
struct Ring {
    std::uint64_t magic;
    std::uint32_t source, source_incarnation;
    std::uint32_t target, target_incarnation;
    std::uint64_t capacity;  // a power of two
    Offset older;  // ring from the same slot, made before
    alignas(128) std::atomic<std::uint64_t> head;  // the sender's
    std::atomic<std::uint32_t> wants_room;
    alignas(128) std::atomic<std::uint64_t> tail;  // the receiver's
};

inline constexpr std::uint64_t kMinRing = 64u << 10;
inline constexpr std::uint64_t kUsualRing = 256u << 10;  // stays in a core's cache, and a new ring costs few page faults
// Where a store to a line that the reader has in its cache is slow (base/streaming.h): when the writer comes round, the reader's cache has let
// go of it.
inline constexpr std::uint64_t kLongRing = 2u << 20;

// All rings of a full host together take 64 MiB at most, within the bounds for one.
constexpr std::uint64_t ring_capacity(int world_size, std::uint64_t most) {
    auto n = static_cast<std::uint64_t>(world_size);
    std::uint64_t share = n < 2 ? most : (64ull << 20) / (n * (n - 1));
    std::uint64_t capacity = kMinRing;
    while (capacity * 2 <= share && capacity < most) capacity *= 2;
    return capacity;
}
// Of those that this process writes. (One that runs by itself under an emulator of processors may take them for another maker's.)
inline std::uint64_t ring_capacity(int world_size) {
    static const bool streams = default_stream_limit() != kNeverStreams;
    return ring_capacity(world_size, streams ? kLongRing : kUsualRing);
}
constexpr bool is_ring_capacity(std::uint64_t bytes) {
    return std::has_single_bit(bytes) && bytes >= kMinRing && bytes <= kLongRing;
}
// A frame fits an idle ring wherever the last one ended. The same on all machines.
constexpr std::uint32_t max_payload(int world_size) {
    return static_cast<std::uint32_t>(ring_capacity(world_size, kUsualRing) / 4);
}

}  // namespace ftcomm::shm
