// The writing side of a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "base/bytes.h"
#include "base/copy.h"
#include "base/held.h"
#include "base/status.h"
#include "pairlog/index.h"
#include "pairlog/log_dir.h"
#include "pairlog/record.h"
#include "pairlog/segment.h"

namespace ftcomm::pairlog {

class StreamWriter {
public:
    // Makes the stream, or goes on with what its last writer left: a record that was not committed is dropped. Refused while
    // another living process writes it. The LogDir must outlive the writer.
    static Status open(LogDir& dir, const StreamKey& key, std::unique_ptr<StreamWriter>* out);
    // Whether there is one to go on with.
    static Status exists(const LogDir& dir, const StreamKey& key, bool* there);
    ~StreamWriter();

    const StreamKey& key() const { return key_; }
    std::uint64_t last_seq() const { return last_; }              // 0: no record yet
    std::uint64_t first_seq() const { return collected_ + 1; }    // the oldest that find() gives; last_seq() + 1: none

    // Begins record last_seq() + 1 with info.length bytes of payload: 64-byte aligned memory to write it to. LogFull leaves
    // everything as it was. While a record is open, only publish, commit, abandon, find, collect and flush are
    // allowed.
    Status begin(const RecordInfo& info, std::byte** payload);
    // The first `bytes` of the payload are there and final: readers may copy them. Call it every 100 KiB or so, while they are
    // in the cache: the checksum is computed here, unless it is known.
    void publish(std::uint64_t bytes, std::optional<std::uint32_t> sum = {});
    // Writes what comes next of the payload, and publishes it. Into memory: nobody will read it soon. It may be there already (room).
    void put(ByteView part, Into into = Into::Caches);
    // Where bytes [at, at + bytes) of the open record's payload go, if they are the next ones; else null.
    std::byte* room(std::uint64_t at, std::uint64_t bytes) const {
        return payload_ != nullptr && at == published_ && bytes <= info_.length - at ? payload_ + at : nullptr;
    }
    // The payload is there: the record is part of the stream from here on. Publishes the rest.
    Status commit();
    bool is_open() const { return payload_ != nullptr; }          // a record is begun
    void abandon();                                               // the open record never was
    const RecordInfo& last_record() const { return info_; }       // of the last begin: with crc after the commit

    // The next record, if it has at most so many bytes, begins without LogFull.
    Status make_room(std::uint64_t length);

    // begin, copy, publish, commit. In chunks, so that a reader copies while this goes on.
    Status append(const RecordInfo& info, ByteView payload);
    // The same of parts of info.length together, which is little: nobody needs to see a part of the record, so it is not opened. What a crash leaves
    // before the header is written is no record.
    Status append_whole(const RecordInfo& info, std::span<const ByteView> parts);

    // A committed record. The view holds until the next append, begin, collect or prepare on this LogDir, by whichever stream;
    // of a spilled one until MappedSpilled::kMost other segments are mapped.
    // Invalid: it is not there (yet, or any more). LogCorrupt: its header, or with `verify` its payload, is damaged.
    Status find(std::uint64_t seq, RecordInfo* info, ByteView* payload, bool verify = true);

    // Bytes of a record's payload, which may be the open one's if they are published. As long as they are held nothing is written over them,
    // though the record be collected. Held by nobody: they are not there.
    Held hold(std::uint64_t seq, std::uint64_t at, std::uint64_t bytes);

    // Records up to `through` are not needed any more. Where the stream has a consumer, only what it has acknowledged goes
    // now, the rest with a later call or when more room is needed. Memory comes back in whole segments.
    Status collect(std::uint64_t through);

    // Of a stream without records: the next one is `through` + 1, as if those before it had been collected.
    Status skip(std::uint64_t through);

    // Durability::Host: all committed records are on stable storage when it returns; else does nothing. From any thread.
    Status flush();
    std::uint64_t synced() const;

private:
    friend class LogDir;

    StreamWriter(LogDir& dir, const StreamKey& key) : dir_(dir), key_(key) {}
    // recover.cc
    Status recover();
    bool is_same_boot() const;
    Status load();                                       // fills segments_
    Status load_one(std::uint64_t ordinal, bool spilled);
    Status find_end();
    Status find_synced_end();
    Status drop_all_but(std::size_t count);
    // writer.cc
    Status place(const RecordInfo& info);
    Status find_segment(std::uint64_t seq, Segment** out);
    std::uint64_t grown_for(std::uint64_t length) const;
    Status roll(std::uint64_t length);
    Status collect_now();
    Status release_front();
    // spill.cc
    Segment* coldest(bool full) const;
    Status spill(Segment* segment);
    Status map_spilled(const std::shared_ptr<Segment>& segment);
    void drop_spilled(std::uint64_t ordinal);

    LogDir& dir_;
    StreamKey key_;
    Fd folder_, spill_folder_;
    FileLock lock_;
    IndexFile index_;
    std::deque<std::shared_ptr<Segment>> segments_;   // the oldest first; written is the last
    std::uint64_t last_ = 0, collected_ = 0, wanted_ = 0;
    std::uint64_t next_ordinal_ = 1;
    RecordInfo info_;
    std::byte* payload_ = nullptr;                    // of the open record; null: none
    std::uint64_t published_ = 0;
    bool given_up_ = true;                            // where the next record begins there may have been one
    struct {
        std::uint64_t seq = 0, at = 0, bytes = 0;
        std::uint32_t sum = 0;
    } newest_part_;                                   // that put() has summed apart
    std::mutex flushing_;                             // one flush at a time
    std::uint64_t synced_ordinal_ = 0;                // guarded by it: segments before this one are on stable storage
};

}  // namespace ftcomm::pairlog
