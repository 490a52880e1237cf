// One file of a stream: where its records lie. Used by the writer, who adds records, and by readers, who scan for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "pairlog/files.h"
#include "pairlog/record.h"

namespace ftcomm::pairlog {

// Bytes of the segment for a record of that length: the usual size, or for a larger one its own. In quarters of a power
// of two, so that records of about one size reuse each other's memory and at most a fifth of it lies idle.
std::uint64_t segment_size_for(std::uint64_t length, std::uint64_t usual);

class Segment {
public:
    // Looks at the header of a mapped file. LogCorrupt says what is wrong with it.
    static Status check(const Mapping& file, const StreamKey& key, std::uint64_t ordinal, bool spilled, SegmentHeader* out);
    // The same of one that was read from a file of that size.
    static Status check(const SegmentHeader& header, std::uint64_t size, const StreamKey& key, std::uint64_t ordinal,
                        bool spilled);

    Segment(std::shared_ptr<Mapping> file, const SegmentHeader& header)
        : file_size(file->size), file_(std::move(file)), header_(header) {}
    // A spilled one that is not mapped yet.
    Segment(std::uint64_t size, const SegmentHeader& header) : spilled(true), file_size(size), header_(header) {}

    const SegmentHeader& header() const { return header_; }
    std::uint64_t ordinal() const { return header_.ordinal; }
    std::uint64_t first_seq() const { return header_.first_seq; }
    std::uint64_t next_seq() const { return header_.first_seq + offsets_.size(); }  // after the last known one
    std::uint64_t end() const { return end_; }                                      // offset after the last known one
    bool fits(std::uint64_t length) const {
        return !spilled && end_ + sizeof(RecordHeader) <= header_.size && length <= header_.size - end_ - sizeof(RecordHeader);
    }
    std::byte* at(std::uint64_t offset) const { return file_->base + offset; }
    const std::shared_ptr<Mapping>& file() const { return file_; }

    // Goes on to record `through`, if it is there whole; false if not, and next_seq() is then the first that is not.
    bool scan(std::uint64_t through);
    void added(std::uint64_t length);   // the writer has committed a record at end()
    void drop_last();
    // Of a known record. LogCorrupt if its header or (verify) its payload no longer matches.
    Status read(const StreamKey& key, std::uint64_t seq, bool verify, RecordInfo* info, ByteView* payload) const;
    void move_to(std::shared_ptr<Mapping> file) { file_ = std::move(file); }   // null: not mapped at the moment

    bool spilled = false;
    std::uint64_t file_size;
    std::uint64_t age = 0;   // in the order in which this process began segments

private:
    std::shared_ptr<Mapping> file_;
    SegmentHeader header_;
    std::vector<std::uint32_t> offsets_;   // of the headers from first_seq on, by 64 bytes
    std::uint64_t end_ = kFirstRecord;
};

// Which spilled segments are mapped: those looked into last, as there may be more of them than mappings of a process.
class MappedSpilled {
public:
    static constexpr std::size_t kMost = 1024;
    void add(const std::shared_ptr<Segment>& segment) {
        mapped_.push_back(segment);
        if (mapped_.size() <= kMost) return;
        if (const auto oldest = mapped_.front().lock()) oldest->move_to(nullptr);
        mapped_.pop_front();
    }

private:
    std::deque<std::weak_ptr<Segment>> mapped_;
};

}  // namespace ftcomm::pairlog
