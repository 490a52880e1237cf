// The reading side of a stream, in any process of the host.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "pairlog/index.h"
#include "pairlog/log_dir.h"
#include "pairlog/record.h"
#include "pairlog/segment.h"

namespace ftcomm::pairlog {

class StreamReader {
public:
    // A consumer holds back the reuse of what it has not acknowledged; a stream has at most one at a time, whose successor
    // goes on from what it finds acknowledged. An observer holds back nothing: it looks at intact() after it has copied.
    enum class Role { Consumer, Observer };

    // The writer need not have made the stream yet: then it is empty until a refresh() finds it. The LogDir must outlive it.
    static Status open(LogDir& dir, const StreamKey& key, Role role, std::unique_ptr<StreamReader>* out);

    // Looks at the watermarks; whether there are new records, or new bytes of the open one. Ends the views given before.
    bool refresh();
    std::uint64_t last_seq() const { return last_; }
    std::uint64_t first_seq() const { return collected_ + 1; }
    const Status& error() const { return error_; }   // why a stream that is there can't be opened; find says the same

    // The record after last_seq(), while it is being written: what it will be (crc: 0) and the bytes that are final so far.
    // What was copied counts if the generation is still the same afterwards: else the writer (or its successor) has given that
    // record up and may have begun another in its place (is_at() says whether it has). false: none is open, or last_seq() is no longer the last.
    bool partial(RecordInfo* info, ByteView* so_far, std::uint64_t* generation);
    std::uint64_t generation() const;
    // Whether what partial() gave is still what is there: the record's header has not been written again with something else.
    std::uint64_t newest_segment() const { return segments_.empty() ? 0 : segments_.rbegin()->first; }
    bool is_at(const RecordInfo& info, ByteView so_far) const;

    // A record of first_seq() to last_seq(). The view holds until the next refresh(); of a spilled one until MappedSpilled::kMost
    // other segments are mapped.
    Status find(std::uint64_t seq, RecordInfo* info, ByteView* payload, bool verify = true);
    // What was copied of this record before is what was committed: its memory has not been given to another one.
    bool intact(std::uint64_t seq) const;

    // The consumer looks at nothing up to seq any more.
    void acknowledge(std::uint64_t seq);
    std::uint64_t acknowledged() const;

private:
    StreamReader(LogDir& dir, const StreamKey& key, Role role) : dir_(dir), key_(key), role_(role) {}
    bool attach();
    void let_go();  // of segments that are collected or spilled
    Status find_segment(std::uint64_t seq, Segment** out);
    Status open_oldest();
    Status open_spill_folder();  // if there is one of this stream
    // Mapped; opens it if needed. Null with status ok: there is none (any more).
    Segment* known(std::uint64_t ordinal, Status* status);
    Status open_segment(std::uint64_t ordinal, bool spilled, std::shared_ptr<Segment>* out);

    LogDir& dir_;
    StreamKey key_;
    Role role_;
    Fd folder_, spill_folder_;
    IndexFile index_;
    Status error_;
    std::uint64_t last_ = 0, collected_ = 0, spilled_ = 0, seen_open_ = 0, seen_published_ = 0, seen_generation_ = 0;
    std::map<std::uint64_t, std::shared_ptr<Segment>> segments_;  // by ordinal
    bool opened_ = false;  // one of them, or what it is about has changed, since the last look at what may go
};

}  // namespace ftcomm::pairlog
