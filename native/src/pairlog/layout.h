// The bytes on disk, as docs/log-format.md describes them. Both supported architectures are little-endian.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ftcomm::pairlog {

inline constexpr std::uint32_t kVersion = 2;                         // of all files; another one is refused
inline constexpr std::uint64_t kSegmentMagic = 0x314745535f435446;   // "FTC_SEG1"
inline constexpr std::uint64_t kIndexMagic = 0x315844495f435446;     // "FTC_IDX1"
inline constexpr std::uint32_t kRecordMagic = 0x43455246;            // "FREC"
inline constexpr std::uint64_t kPage = 4096;                         // unit of segment sizes, whatever the machine's pages
inline constexpr std::uint64_t kAlign = 64;                          // of record headers and payloads

// At the start of a segment. Written before the file gets its name in the stream's folder, and then never again.
struct SegmentHeader {
    std::uint64_t magic = kSegmentMagic;
    std::uint32_t version = kVersion;
    std::uint32_t crc = 0;         // of this struct with crc == 0
    std::uint64_t comm = 0;
    std::int32_t src = 0;
    std::int32_t dst = 0;
    std::uint64_t ordinal = 0;     // 1, 2, 3...: also the name of the file
    std::uint64_t first_seq = 0;   // number of the first record in it
    std::uint64_t size = 0;        // of the file, header included
    std::uint64_t nonce = 0;       // of this use of the memory: seeds the CRC of its record headers
    std::uint64_t boot = 0;        // hash of the host's boot id when it was begun
};
static_assert(sizeof(SegmentHeader) == 72 && std::is_trivially_copyable_v<SegmentHeader>);

// The header of the first record ends with the first page, so that a payload of 64 MiB takes 64 MiB and one page.
inline constexpr std::uint64_t kFirstRecord = kPage - 64;

enum class RecordState : std::uint8_t { None = 0, Open = 1, Committed = 2 };

struct RecordHeader {
    std::uint32_t magic = kRecordMagic;
    std::uint32_t crc = 0;           // of this struct with crc == 0, seeded with the segment's nonce
    std::uint64_t seq = 0;
    std::uint64_t length = 0;
    std::int64_t tag = 0;
    std::uint64_t aux = 0;
    std::uint64_t step = 0;
    std::uint32_t micro_batch = 0;
    std::uint32_t payload_crc = 0;   // 0 while the record is open
    std::uint8_t kind = 0;
    RecordState state = RecordState::None;
    std::uint16_t unused = 0;
    std::uint32_t unused2 = 0;
};
static_assert(sizeof(RecordHeader) == 64 && std::is_trivially_copyable_v<RecordHeader>);

using Word = std::atomic<std::uint64_t>;
inline constexpr auto kRelaxed = std::memory_order_relaxed;
static_assert(Word::is_always_lock_free);

// One page per stream. Each word is written by one side only; a cache line for each side.
struct Index {
    std::uint64_t magic;
    std::uint32_t version;
    std::uint32_t crc;   // of the fields of this line with crc == 0
    std::uint64_t comm;
    std::int32_t src;
    std::int32_t dst;

    alignas(64) Word sent;   // number of the last committed record
    Word open_seq;           // of the record that is being written, 0: none
    Word open_ordinal;       // where it is
    Word open_offset;
    Word published;          // so many bytes of its payload are final
    Word generation;         // one more whenever an open record is given up, and with each new writer

    alignas(64) Word collected;   // records up to here are given up; their memory is or will be reused
    Word spilled;                 // ordinal of the newest segment in the spill folder
    Word synced;                  // records up to here are on stable storage
    Word boot;                    // hash of the host's boot id when a writer last opened the stream

    alignas(64) Word acknowledged;   // written by the consumer: it does not look at records up to here any more
    Word consumer;                   // 1: there is a consumer, and only what it has acknowledged is reused
};
static_assert(sizeof(Index) == 256 && offsetof(Index, sent) == 64 && offsetof(Index, collected) == 128 &&
              offsetof(Index, acknowledged) == 192);

inline constexpr std::uint64_t aligned(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace ftcomm::pairlog
