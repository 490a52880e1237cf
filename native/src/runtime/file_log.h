// The pair log in files of this host (pairlog/), as the protocol asks for it.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "channel/log.h"
#include "communicator/request.h"
#include "pairlog/stream.h"

namespace ftcomm {

struct FileLogConfig {
    pairlog::LogConfig files;
    int slot = 0;
    bool again = false;  // it is not the slot's first process
    bool unlogged = false;  // but no process of the job has come so far as to log anything, says the store
    bool remove_old = false;           // what killed runs have left beside it
    bool keep = false;                 // it is not this process's to remove, nor that of any other run
    std::vector<std::uint64_t> hosts;  // per slot; 0: not known
    Time deadline = 0;                 // of open, 0: none
    int stop_event = -1;               // readable: open gives up
};

class FileLog final : public Log {
public:
    static Status open(const FileLogConfig& config, std::unique_ptr<FileLog>* out);

    std::uint64_t last(const LogKey& key) override;
    std::uint64_t first(const LogKey& key) override;
    Status state(const LogKey& key) override;
    Status append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) override;
    Status make_room(const LogKey& key, std::uint64_t bytes) override;
    Status append_made(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, const Make& make) override;
    Status append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                        ByteView piece, std::uint32_t* crc) override;
    std::byte* piece_room(const LogKey& key, std::uint64_t at, std::uint64_t bytes) override;
    Held hold(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) override;
    Status commit_pieces(const LogKey& key) override;
    void abandon_pieces(const LogKey& key) override;
    Status view_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes, View* out) override;
    Status read_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::span<std::byte> to,
                       std::uint32_t* crc) override;
    Status append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                        const Shown& shown) override;
    bool shows_pieces() const override { return true; }
    Status flush() override;
    bool is_durable() const override { return dir_->host_durable(); }
    Status find(const LogKey& key, std::uint64_t seq, LogRecord* out) override { return get(key, seq, true, out); }
    Status peek(const LogKey& key, std::uint64_t seq, LogRecord* out) override { return get(key, seq, false, out); }
    Status collect(const LogKey& key, std::uint64_t through) override;
    bool readable(int slot) override;
    bool lost() const override { return lost_; }
    Status skip(const LogKey& key, std::uint64_t through) override;
    void set_position(const LogPosition& position) override { position_ = position; }

    // After a leave: the last of this host removes the folder.
    void remove_if_last();
    std::uint64_t resident() const { return dir_->resident(); }
    std::uint64_t syncs() const { return dir_->syncs(); }
    std::uint64_t spilled() const { return dir_->spilled(); }

private:
    static constexpr std::size_t kLongResult = 4u << 10;  // as kLongMessage, of what hardly anybody reads but who runs again

    explicit FileLog(const FileLogConfig& config) : config_(config) {}
    bool own(const LogKey& key) { return key.src == config_.slot || (key.dst == config_.slot && !readable(key.src)); }
    Status own_writer(const LogKey& key, pairlog::StreamWriter** out);  // to append to the stream
    pairlog::RecordInfo info_of(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes) const;
    Status begin(pairlog::StreamWriter& writer, const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes,
                 std::byte** payload);
    Status commit(pairlog::StreamWriter& writer);
    Status make_durable(pairlog::StreamWriter& writer);
    Status get(const LogKey& key, std::uint64_t seq, bool verify, LogRecord* out);
    pairlog::StreamKey file_of(const LogKey& key) const;
    // Of this rank's own streams; a failure to open is said by append and find.
    pairlog::StreamWriter* writer(const LogKey& key, Status* why = nullptr);
    pairlog::StreamWriter* used_writer(const LogKey& key, Status* why = nullptr);
    pairlog::StreamReader* reader(const LogKey& key, Status* why = nullptr);
    struct Found {
        pairlog::StreamReader* reader = nullptr;
        pairlog::RecordInfo info;
        ByteView payload;  // as much of it as there is
        bool committed = false;
        std::uint64_t generation = 0;  // if it is not
    };
    Status find_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t end, Found* out);
    static bool stands(const Found& found, std::uint64_t seq);

    const FileLogConfig config_;
    LogPosition position_;
    pairlog::UseLock used_;  // before all that has files in the folder
    std::unique_ptr<pairlog::LogDir> dir_;
    pairlog::Fd folder_;
    pairlog::FileLock mark_;            // this process is the rank
    bool lost_ = false;
    std::map<LogKey, std::unique_ptr<pairlog::StreamWriter>> writers_;
    std::set<LogKey> unused_;  // own streams that no process of this slot has written to
    LogKey recent_key_;  // looked for last: most of the time it is the next one, too
    pairlog::StreamWriter* recent_ = nullptr;  // of writers_
    std::map<LogKey, std::unique_ptr<pairlog::StreamReader>> readers_;
    std::pair<LogKey, pairlog::StreamReader*> recent_readers_[2];  // of readers_
    std::map<pairlog::StreamReader*, std::uint64_t> shown_;  // those of find_pieces, and the newest segment that each has seen
    std::set<pairlog::StreamWriter*> unsynced_;  // of writers_
};

}  // namespace ftcomm
