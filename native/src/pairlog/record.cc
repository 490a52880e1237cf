#include "pairlog/record.h"

#include <array>
#include <atomic>
#include <bit>
#include <cinttypes>
#include <cstdio>

#include "base/crc32c.h"

namespace ftcomm::pairlog {
namespace {

std::uint32_t crc_of(RecordHeader header, std::uint64_t nonce) {
    header.crc = 0;
    return crc32c(&header, sizeof header, crc32c(&nonce, sizeof nonce));
}

}  // namespace

std::string name_of(const StreamKey& key) {
    char text[48];
    std::snprintf(text, sizeof text, "%016" PRIx64 "-%d-%d", key.comm, key.src, key.dst);
    return text;
}

std::string text_of(const StreamKey& key) {
    char text[80];
    std::snprintf(text, sizeof text, "%d->%d of communicator %" PRIx64, key.src, key.dst, key.comm);
    return text;
}

std::string segment_name(std::uint64_t ordinal) {
    char text[24];
    std::snprintf(text, sizeof text, "%016" PRIx64, ordinal);
    return text;
}

bool parse_segment_name(const std::string& name, std::uint64_t* ordinal) {
    if (name.size() != 16 || name.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
    *ordinal = std::stoull(name, nullptr, 16);
    return *ordinal != 0;
}

Status damaged(const StreamKey& key, std::uint64_t seq, const std::string& text) {
    const std::string record = seq == 0 ? "" : "record " + std::to_string(seq) + " of ";
    return Status::error(Code::LogCorrupt, record + "the log " + text_of(key) + " is damaged: " + text);
}

RecordHeader header_of(const RecordInfo& info, RecordState state, std::uint64_t nonce) {
    RecordHeader header;
    header.seq = info.seq;
    header.length = info.length;
    header.tag = info.tag;
    header.aux = info.aux;
    header.step = info.step;
    header.micro_batch = info.micro_batch;
    header.payload_crc = info.crc;
    header.kind = static_cast<std::uint8_t>(info.kind);
    header.state = state;
    if (state == RecordState::Committed) header.crc = crc_of(header, nonce);  // of an open one nobody asks for it
    return header;
}

RecordInfo info_of(const RecordHeader& header) {
    return {static_cast<RecordKind>(header.kind),
            header.seq,
            header.tag,
            header.aux,
            header.step,
            header.micro_batch,
            header.payload_crc,
            header.length};
}

bool read_record(const std::byte* at, std::uint64_t nonce, std::uint64_t seq, RecordHeader* out) {
    *out = read_words(at);
    return out->magic == kRecordMagic && out->state == RecordState::Committed && out->seq == seq &&
           out->crc == crc_of(*out, nonce);
}

using Words = std::array<std::uint64_t, sizeof(RecordHeader) / 8>;

void write_words(std::byte* to, const RecordHeader& header) {
    const auto words = std::bit_cast<Words>(header);
    auto* target = reinterpret_cast<std::uint64_t*>(to);
    for (std::size_t i = 0; i < words.size(); ++i)
        std::atomic_ref<std::uint64_t>(target[i]).store(words[i], std::memory_order_relaxed);
}

RecordHeader read_words(const std::byte* from) {
    Words words;
    // const_cast: atomic_ref of C++20 takes no const; a load writes nothing.
    auto* source = const_cast<std::uint64_t*>(reinterpret_cast<const std::uint64_t*>(from));
    for (std::size_t i = 0; i < words.size(); ++i)
        words[i] = std::atomic_ref<std::uint64_t>(source[i]).load(std::memory_order_relaxed);
    return std::bit_cast<RecordHeader>(words);
}

std::uint32_t crc_of(SegmentHeader header) {
    header.crc = 0;
    return crc32c(&header, sizeof header);
}

}  // namespace ftcomm::pairlog
