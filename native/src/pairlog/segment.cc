#include "pairlog/segment.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/crc32c.h"

namespace ftcomm::pairlog {

std::uint64_t segment_size_for(std::uint64_t length, std::uint64_t usual) {
    if (length <= usual - kPage) return usual;
    const std::uint64_t quarter = std::max<std::uint64_t>(std::bit_floor(length) / 4, kPage);
    return kPage + aligned(length, quarter);
}

Status Segment::check(const Mapping& file, const StreamKey& key, std::uint64_t ordinal, bool spilled, SegmentHeader* out) {
    if (file.size >= sizeof *out) std::memcpy(out, file.base, sizeof *out);
    return check(*out, file.size, key, ordinal, spilled);
}

Status Segment::check(const SegmentHeader& header, std::uint64_t size, const StreamKey& key, std::uint64_t ordinal,
                      bool spilled) {
    const std::string name = "segment " + std::to_string(ordinal);
    if (size < kPage) return damaged(key, 0, name + " is truncated to " + size_text(size));
    if (header.magic != kSegmentMagic) return damaged(key, 0, name + " does not begin like a segment");
    if (header.version != kVersion)
        return damaged(key, 0,
                       name + " has version " + std::to_string(header.version) + " of the format, this ftcomm has " +
                           std::to_string(kVersion) + ": remove the folder, or go on with the ftcomm that wrote it");
    if (header.crc != crc_of(header)) return damaged(key, 0, "the header of " + name + " does not match its checksum");
    if (!(StreamKey{header.comm, header.src, header.dst} == key) || header.ordinal != ordinal)
        return damaged(key, 0,
                       name + " is segment " + std::to_string(header.ordinal) + " of " +
                           text_of({header.comm, header.src, header.dst}) + " by its header");
    // In the spill folder it ends with its last record.
    if (spilled ? size > header.size : size != header.size)
        return damaged(key, 0, name + " has " + size_text(size) + ", its header says " + size_text(header.size));
    return {};
}

bool Segment::scan(std::uint64_t through) {
    RecordHeader header;
    while (next_seq() <= through) {
        if (end_ + sizeof header > file_->size || !read_record(at(end_), header_.nonce, next_seq(), &header)) return false;
        if (header.length > file_->size - end_ - sizeof header) return false;
        added(header.length);
    }
    return true;
}

void Segment::added(std::uint64_t length) {
    offsets_.push_back(static_cast<std::uint32_t>(end_ / kAlign));
    end_ = aligned(end_ + sizeof(RecordHeader) + length, kAlign);
}

void Segment::drop_last() {
    end_ = offsets_.back() * kAlign;
    offsets_.pop_back();
}

Status Segment::read(const StreamKey& key, std::uint64_t seq, bool verify, RecordInfo* info, ByteView* payload) const {
    const auto* place = at(offsets_[seq - first_seq()] * kAlign);
    RecordHeader header;
    if (!read_record(place, header_.nonce, seq, &header)) return damaged(key, seq, "its header does not match its checksum");
    *info = info_of(header);
    *payload = ByteView(place + sizeof header, header.length);
    if (verify && crc32c(payload->data(), payload->size()) != header.payload_crc)
        return damaged(key, seq, "its " + std::to_string(header.length) + " bytes do not match their checksum");
    return {};
}

}  // namespace ftcomm::pairlog
