// Records that are logged off the critical path: what is sent or has arrived stays in memory, and is written while the rank waits for
// something, or in the background; at the latest at the second tick after, and before a flush() returns. (SWIFT 5.1, for a log in memory.)
// Who looks in the log finds it from the start. Where the log has to survive the host, all that was waiting is synced together (group commit).
//
// A large message to another host is logged piece by piece as it goes out: each is read once for both.
//
// Only what goes through append_later and append_held may be late, and only in streams that no other process reads in the log.
#pragma once

#include <algorithm>
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
    Status make_room(const LogKey& key, std::uint64_t bytes) override { return log_->make_room(key, bytes); }
    Status append_made(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, const Make& make) override;
    Status find(const LogKey& key, std::uint64_t seq, LogRecord* out) override;
    Status peek(const LogKey& key, std::uint64_t seq, LogRecord* out) override;
    Status append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                        ByteView piece, std::uint32_t* crc) override {
        return log_->append_piece(key, tag, aux, bytes, at, piece, crc);
    }
    std::byte* piece_room(const LogKey& key, std::uint64_t at, std::uint64_t bytes) override {
        return log_->piece_room(key, at, bytes);
    }
    Status commit_pieces(const LogKey& key) override { return log_->commit_pieces(key); }
    void abandon_pieces(const LogKey& key) override { log_->abandon_pieces(key); }
    Status read_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::span<std::byte> to,
                       std::uint32_t* crc) override {
        return log_->read_pieces(key, seq, at, to, crc);
    }
    Status view_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes, View* out) override {
        return log_->view_pieces(key, seq, at, bytes, out);
    }
    Status append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                        const Shown& shown) override;
    bool shows_pieces() const override { return log_->shows_pieces(); }
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
    void append_sent(const LogKey& key, std::uint64_t seq, std::uint64_t at, ByteView piece,
                     std::optional<std::uint32_t>* crc) override;
    Held hold(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) override;
    void release_all() override;
    Status flush() override;

    // Writes a piece of the oldest record, short enough that who waits for the engine need not wait long.
    void work();
    bool has_work() const { return (!order_.empty() || is_unsynced()) && failed_.ok(); }
    // Some of it has waited for a whole tick.
    bool is_due() const { return has_work() && oldest() <= due_; }
    void on_tick();
    std::uint64_t records() const { return order_.size(); }

private:
    struct Late {
        std::int64_t tag;
        std::uint64_t aux;
        Bytes owned;
        ByteView payload;  // in `owned`, or held
        LogPosition position;
        std::function<void()> release{};  // of what is held
        std::uint64_t number = 0;  // in the order of the calls
        std::uint64_t written = 0;  // so many bytes of it are in the log, if it is the first of its stream; without a commit
    };

    Status catch_up(const LogKey& key);
    const Late* late(const LogKey& key, std::uint64_t seq);  // null: it is written, or not there
    Status failed(Status status);
    Status make_room(std::uint64_t bytes);
    void add(const LogKey& key, Late late);
    Status write_oldest(std::uint64_t most);
    Status write(const LogKey& key, ByteView piece, std::uint32_t* crc);  // the next one of the stream's first record
    Status sync();
    bool is_unsynced() const { return oldest_unsynced_ != kNone; }
    // Streams overtake each other, where one is logged as it is sent; within each, and so in order_, numbers rise.
    std::uint64_t oldest() const {
        return order_.empty() ? oldest_unsynced_ : std::min(oldest_unsynced_, late_.at(order_.front()).front().number);
    }
    void recycle(Bytes&& memory);

    Log* const log_;
    const bool on_;
    LogPosition position_;
    std::map<LogKey, std::deque<Late>> late_;
    std::deque<LogKey> order_;  // of all records that are late
    std::uint64_t bytes_ = 0;
    static constexpr std::uint64_t kNone = ~std::uint64_t{0};
    std::uint64_t queued_ = 0;  // records so far
    std::uint64_t oldest_unsynced_ = kNone;  // number of the first one that is written, and not known to be where it has to be
    std::uint64_t unsynced_bytes_ = 0;
    std::vector<std::function<void()>> releases_;  // of what is written, for when it is on stable storage
    std::uint64_t queued_at_tick_ = 0, due_ = 0;
    Status failed_;  // the log is full: tried again when something is collected, and at a flush
    std::vector<Bytes> spare_;
    std::uint64_t spare_bytes_ = 0;
};

}  // namespace ftcomm
