// What a record is, whose it is, and the 64 bytes in front of its payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "pairlog/layout.h"

namespace ftcomm::pairlog {

// Messages of rank src to rank dst of a communicator; src == dst: what a rank notes for itself.
struct StreamKey {
    std::uint64_t comm = 0;
    std::int32_t src = 0;
    std::int32_t dst = 0;
    bool operator==(const StreamKey&) const = default;
};

enum class RecordKind : std::uint8_t {
    Message = 1,   // the payload is the message
    Result = 2,    // of a collective operation
    Answer = 3,    // of something nondeterministic: who matched a wildcard, a probe, a clock, a draw
    Mark = 4,      // a place in the stream: a checkpoint, a step
    Failure = 5,   // of a collective operation, or the revocation of all that follow
};

struct RecordInfo {
    RecordKind kind = RecordKind::Message;
    std::uint64_t seq = 0;           // 1, 2, 3... without gaps; given by the log
    std::int64_t tag = 0;
    std::uint64_t aux = 0;           // the operation's signature
    std::uint64_t step = 0;
    std::uint32_t micro_batch = 0;
    std::uint32_t crc = 0;           // CRC32C of the payload; computed by the log
    std::uint64_t length = 0;
};

std::string name_of(const StreamKey& key);        // of its folder: "00000000000000ab-3-5"
std::string text_of(const StreamKey& key);        // for people: "3->5 of communicator ab"
std::string segment_name(std::uint64_t ordinal);  // 16 digits of hexadecimal
bool parse_segment_name(const std::string& name, std::uint64_t* ordinal);

// LogCorrupt, with the stream and the record (0: not one in particular) in front of the text.
Status damaged(const StreamKey& key, std::uint64_t seq, const std::string& text);

RecordHeader header_of(const RecordInfo& info, RecordState state, std::uint64_t nonce);
RecordInfo info_of(const RecordHeader& header);

// The header at this place of a segment if it is one of this use of the segment, whole, and of that record.
bool read_record(const std::byte* at, std::uint64_t nonce, std::uint64_t seq, RecordHeader* out);

// By words, so that a reader on the open record sees old or new ones. Published by the release of a watermark.
void write_words(std::byte* to, const RecordHeader& header);
RecordHeader read_words(const std::byte* from);

std::uint32_t crc_of(SegmentHeader header);

}  // namespace ftcomm::pairlog
