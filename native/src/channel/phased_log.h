// The log of one communicator in two parts: what comes before the resume point is kept to the end of the job, because every process runs it
// again; what comes after it goes as checkpoints allow (L6). Numbers go on over both, so that nobody else need know.
#pragma once

#include <algorithm>
#include <map>

#include "channel/log.h"

namespace ftcomm {

class PhasedLog final : public Log {
public:
    // keep_first: no rule of the protocol is switched off.
    explicit PhasedLog(Log& log, bool keep_first = true) : log_(log), keep_first_(keep_first) {}

    // From here on records go to the second part; `bases`: how many of each stream are in the first.
    void split(std::map<LogKey, std::uint64_t> bases) {
        bases_ = std::move(bases);
        split_ = true;
    }
    bool is_split() const { return split_; }
    // Before the process says where it goes on, what comes after the resume point is not for it to read.
    void set_reading(bool on) { reading_ = on; }
    bool reading() const { return reading_; }

    // Which of its parts record `seq` is in, or will be.
    int part_of(const LogKey& key, std::uint64_t seq) const { return split_ && seq > base(key) ? 1 : 0; }
    std::uint64_t base(const LogKey& key) const {
        const auto it = bases_.find(key);
        return it == bases_.end() ? 0 : it->second;
    }
    std::uint64_t last(const LogKey& key) override { return split_ ? base(key) + log_.last(second(key)) : log_.last(key); }
    // Of what comes after the resume point.
    std::uint64_t first(const LogKey& key) override { return split_ ? base(key) + log_.first(second(key)) : log_.first(key); }
    Status state(const LogKey& key) override {
        auto s = log_.state(key);
        return s && split_ ? log_.state(second(key)) : s;
    }
    Status append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) override {
        return log_.append(split_ ? second(key) : key, tag, aux, parts);
    }
    Status make_room(const LogKey& key, std::uint64_t bytes) override {
        return log_.make_room(split_ ? second(key) : key, bytes);
    }
    Status append_made(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, const Make& make) override {
        return log_.append_made(split_ ? second(key) : key, tag, aux, bytes, make);
    }
    Status find(const LogKey& key, std::uint64_t seq, LogRecord* out) override { return get(&Log::find, key, seq, out); }
    Status peek(const LogKey& key, std::uint64_t seq, LogRecord* out) override { return get(&Log::peek, key, seq, out); }
    Status collect(const LogKey& key, std::uint64_t through) override {
        const auto before = base(key);
        if (!keep_first_ && split_)  // rule L6 switched off: the part before the resume point goes as well
            if (auto s = log_.collect(key, std::min(through, before)); !s) return s;
        return split_ && through > before ? log_.collect(second(key), through - before) : Status{};
    }
    bool readable(int slot) override { return log_.readable(slot); }
    void set_position(const LogPosition& position) override { log_.set_position(position); }
    Status append_later(const LogKey& key, std::int64_t tag, std::uint64_t aux, Bytes& payload) override {
        return log_.append_later(split_ ? second(key) : key, tag, aux, payload);
    }
    Status append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                        ByteView piece, std::uint32_t* crc) override {
        return log_.append_piece(split_ ? second(key) : key, tag, aux, bytes, at, piece, crc);
    }
    std::byte* piece_room(const LogKey& key, std::uint64_t at, std::uint64_t bytes) override {
        return log_.piece_room(split_ ? second(key) : key, at, bytes);
    }
    Status commit_pieces(const LogKey& key) override { return log_.commit_pieces(split_ ? second(key) : key); }
    void abandon_pieces(const LogKey& key) override { log_.abandon_pieces(split_ ? second(key) : key); }
    Status read_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::span<std::byte> to,
                       std::uint32_t* crc) override {
        return part_of(key, seq) == 1 ? log_.read_pieces(second(key), seq - base(key), at, to, crc)
                                      : log_.read_pieces(key, seq, at, to, crc);
    }
    Status view_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes, View* out) override {
        return part_of(key, seq) == 1 ? log_.view_pieces(second(key), seq - base(key), at, bytes, out)
                                      : log_.view_pieces(key, seq, at, bytes, out);
    }
    Status append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                        const Shown& shown) override {
        return log_.append_shown(split_ ? second(key) : key, tag, aux, payload, stretch, shown);
    }
    bool shows_pieces() const override { return log_.shows_pieces(); }
    Status append_held(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload,
                       std::function<void()> release) override {
        return log_.append_held(split_ ? second(key) : key, tag, aux, payload, std::move(release));
    }
    void append_sent(const LogKey& key, std::uint64_t seq, std::uint64_t at, ByteView piece,
                     std::optional<std::uint32_t>* crc) override {
        if (part_of(key, seq) == 1) log_.append_sent(second(key), seq - base(key), at, piece, crc);
        else log_.append_sent(key, seq, at, piece, crc);
    }
    Held hold(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) override {
        return part_of(key, seq) == 1 ? log_.hold(second(key), seq - base(key), at, bytes) : log_.hold(key, seq, at, bytes);
    }
    void release_all() override { log_.release_all(); }
    bool is_late() const override { return log_.is_late(); }
    Bytes scratch(std::uint64_t bytes) override { return log_.scratch(bytes); }
    Status flush() override { return log_.flush(); }

private:
    Status get(Status (Log::*how)(const LogKey&, std::uint64_t, LogRecord*), const LogKey& key, std::uint64_t seq,
               LogRecord* out) {
        const auto before = split_ ? base(key) : seq;
        auto s = seq > before ? (log_.*how)(second(key), seq - before, out) : (log_.*how)(key, seq, out);
        out->seq = seq;
        return s;
    }
    static LogKey second(LogKey key) {
        key.part = 1;
        return key;
    }

    Log& log_;
    const bool keep_first_;
    bool split_ = false, reading_ = true;
    std::map<LogKey, std::uint64_t> bases_;
};

}  // namespace ftcomm
