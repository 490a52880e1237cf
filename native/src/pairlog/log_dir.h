// The log's folder on this host as one process uses it: whose it is, and how much memory the process's streams have.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "pairlog/files.h"
#include "pairlog/pool.h"
#include "pairlog/segment.h"

namespace ftcomm::pairlog {

struct LogConfig {
    enum class Durability { Process, Host };   // survives the death of: the writer; the host (with flush())

    std::string path;                    // folder of this job on this host, made if absent; must be ours
    std::string job;                     // its name; the folder of another job is refused
    int world_size = 0;
    int owner = 0;                       // the rank whose process this is: it takes over the free segments of its predecessors
    std::string scope = "all";           // which messages are in it; a log of others is refused
    std::uint64_t limit = 4ull << 30;    // bytes in segments of this process, free ones included; beyond: spill or LogFull
    std::string spill_path{};            // empty: no spilling. A folder on disk to which whole cold segments move
    std::uint64_t spill_limit = 0;       // 0: none
    Durability durability = Durability::Process;
    std::uint64_t segment_bytes = 8u << 20;
    std::uint64_t grown_bytes = 0;  // of the segments of streams that log much: 0: as many, too
    std::int64_t keep_free_ns = 30'000'000'000;  // free segments stay while so much was in use in the last one or two of these
    std::string boot_id{};  // empty: the host's
};

class StreamWriter;

// Streams are used under one lock of the caller's (the engine's); only StreamWriter::flush and prepare may run beside it.
class LogDir {
public:
    static Status open(const LogConfig& config, std::unique_ptr<LogDir>* out);
    // Removes the folder of a log, of whichever job; another folder is refused.
    static Status remove(const std::string& path);
    ~LogDir();

    // Makes free segments of the usual size, faulted in, until there are so many.
    Status prepare(int segments);

    std::uint64_t resident() const;  // bytes of segments in memory, the free ones included
    std::uint64_t spilled() const;  // bytes in the spill folder
    std::uint64_t free_bytes() const;
    std::uint64_t syncs() const { return syncs_.load(std::memory_order_relaxed); }  // of streams, that had something to write
    const LogConfig& config() const { return config_; }
    std::uint64_t boot() const { return boot_; }
    bool host_durable() const { return config_.durability == LogConfig::Durability::Host; }
    int folder() const { return folder_.get(); }
    IdleMappings& idle() { return idle_; }  // of all readers
    MappedSpilled& mapped_spilled() { return mapped_spilled_; }  // of all streams
    int spill_folder() const { return spill_folder_.get(); }  // -1: none

private:
    friend class StreamWriter;

    // For writers, all under mutex_.
    // Free, or new after making room. notes: for what a rank notes itself (results, answers, marks); messages leave room for two such
    // segments: the checkpoint that gives them room again has to be noted, and that one of them found none.
    Status take(std::uint64_t bytes, bool notes, FreeSegment* out);
    bool take_if_there_is_room(std::uint64_t bytes, FreeSegment* out);  // without dropping anything but what is free
    bool drop_free();  // the segment that is free for longest. False: there is none
    bool drop_free_of_any();  // or, where this process has none, one of those who have died
    Status keep_back(std::uint64_t bytes);
    void give_back(FreeSegment segment);  // from a stream to the pool
    void trim();
    Status spill_one();
    Status full(std::uint64_t bytes, const std::string& why) const;
    Status no_room(const std::string& why) const;  // in its file system, below the limit
    std::string relief() const;
    void note_peak();

    LogConfig config_;
    std::uint64_t boot_ = 0;
    Fd folder_, spill_folder_;
    IdleMappings idle_;
    MappedSpilled mapped_spilled_;
    mutable std::mutex mutex_;
    Pool pool_;
    std::vector<StreamWriter*> writers_;
    std::uint64_t resident_ = 0, spilled_ = 0;
    std::uint64_t ages_ = 0;
    std::atomic<std::uint64_t> syncs_{0};
    std::uint64_t peak_ = 0, peak_before_ = 0;  // of the bytes in use, in this window and the one before
    std::int64_t window_ = 0;  // its start
};

}  // namespace ftcomm::pairlog
