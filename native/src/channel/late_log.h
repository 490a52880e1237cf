// Records that are logged off the critical path: what is sent or has arrived stays in memory, and is written while the rank waits for
// something, or in the background; at the latest at the second tick after, and before a flush() returns. (SWIFT 5.1, for a log in memory.)
// Who looks in the log finds it from the start. Where the log has to survive the host, all that was waiting is synced together (group commit).
//
// Only what goes through append_later and append_held may be late, and only in streams that no other process reads in the log.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "channel/log.h"

namespace ftcomm {

class LateLog final : public Log {
public:
    // on: otherwise nothing is ever late. Without a log nothing may be called but flush, release_all, work and its likes.
    LateLog(Log* log, bool on) : log_(log), on_(on) {}

    std::uint64_t last(const LogKey& key) override;
    std::uint64_t first(const LogKey& key) override { return log_->first(key); }
    Status state(const LogKey& key) override { return log_->state(key); }
    Status append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) override;
    Status find(const LogKey& key, std::uint64_t seq, LogRecord* out) override;
    Status peek(const LogKey& key, std::uint64_t seq, LogRecord* out) override;
    Status append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                        ByteView piece, std::uint32_t* crc) override {
        return log_->append_piece(key, tag, aux, bytes, at, piece, crc);
    }
    Status commit_pieces(const LogKey& key) override { return log_->commit_pieces(key); }
    Status collect(const LogKey& key, std::uint64_t through) override;
    bool readable(int slot) override { return log_->readable(slot); }
    bool lost() const override { return log_->lost(); }
    Status skip(const LogKey& key, std::uint64_t through) override { return log_->skip(key, through); }
    void set_position(const LogPosition& position) override { position_ = position; }
    bool is_late() const override { return on_; }
    Bytes scratch(std::uint64_t bytes) override;
    Status append_later(const LogKey& key, std::int64_t tag, std::uint64_t aux, Bytes& payload) override;
    Status append_held(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload,
                       std::function<void()> release) override;
    void release_all() override;
    Status flush() override;

    // Writes a piece of the oldest record, short enough that who waits for the engine need not wait long.
    void work();
    bool has_work() const { return (!order_.empty() || synced_ < written_) && failed_.ok(); }
    // Some of it has waited for a whole tick.
    bool is_due() const { return has_work() && synced_ < due_; }
    void on_tick();
    std::uint64_t records() const { return order_.size(); }

private:
    struct Late {
        std::int64_t tag;
        std::uint64_t aux;
        Bytes owned;
        ByteView payload;  // in `owned`, or
        LogPosition position;
        std::function<void()> release{};  // held
    };

    const Late* late(const LogKey& key, std::uint64_t seq);  // null: it is written, or not there
    Status failed(Status status);
    Status make_room(std::uint64_t bytes);
    void add(const LogKey& key, Late late);
    Status write_oldest(std::uint64_t most);
    Status sync();
    Status finish_part();
    void recycle(Bytes&& memory);

    Log* const log_;
    const bool on_;
    LogPosition position_;
    std::map<LogKey, std::deque<Late>> late_;
    std::deque<LogKey> order_;  // of all records that are late
    std::uint64_t part_ = 0;  // of the oldest so much is written
    std::uint64_t bytes_ = 0;
    std::uint64_t queued_ = 0, written_ = 0, synced_ = 0;  // so far
    std::uint64_t unsynced_bytes_ = 0;
    std::vector<std::function<void()>> releases_;  // of what is written, for when it is on stable storage
    std::uint64_t queued_at_tick_ = 0, due_ = 0;
    Status failed_;  // the log is full: tried again when something is collected, and at a flush
    std::vector<Bytes> spare_;
    std::uint64_t spare_bytes_ = 0;
};

}  // namespace ftcomm
