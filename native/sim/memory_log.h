// The pair logs of a pretended machine: they outlive the ranks that write them.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "base/crc32c.h"
#include "channel/log.h"

namespace ftcomm {

struct LogFiles {
    struct Record {
        std::int64_t tag;
        std::uint64_t aux;
        Bytes payload;
        std::uint32_t crc;
        LogPosition position{};
    };
    std::map<LogKey, std::deque<Record>> streams;
    std::map<LogKey, Bytes> open;  // records that are written in pieces, until their commit
    std::map<LogKey, Status> damaged;
    std::map<LogKey, std::uint64_t> collected;     // by the writer
    std::map<LogKey, std::uint64_t> acknowledged;  // by a reader in another process
    std::set<LogKey> read;                         // streams that have one: what it has not acknowledged stays
    std::uint64_t limit = ~std::uint64_t{0}, bytes = 0;
    int full_slot = -1;  // has no room for results
    bool lost = false;  // processes of the rank have logged elsewhere
    bool blind = false;  // records in the making cannot be read, as where there is no memory to map them
};

// Slot `self`'s view of them. `readable`: whether that slot's streams are on this rank's host.
class MemoryLog final : public Log {
public:
    MemoryLog(LogFiles& files, int self, std::function<bool(int slot)> readable)
        : files_(files), self_(self), readable_(std::move(readable)) {}

    std::uint64_t last(const LogKey& key) override {
        if (!own(key) && key.dst >= 0) files_.read.insert(key);
        const auto it = files_.streams.find(key);
        return it == files_.streams.end() || !state(key) ? 0 : it->second.size();
    }
    Status state(const LogKey& key) override {
        const auto it = files_.damaged.find(key);
        return it == files_.damaged.end() ? Status{} : it->second;
    }
    std::uint64_t first(const LogKey& key) override {
        const auto collected = files_.collected[key];
        return (files_.read.contains(key) ? std::min(collected, files_.acknowledged[key]) : collected) + 1;
    }
    Status collect(const LogKey& key, std::uint64_t through) override {
        auto& collected = (own(key) ? files_.collected : files_.acknowledged)[key];
        collected = std::max(collected, through);
        return {};
    }
    Status make_room(const LogKey& key, std::uint64_t bytes) override {
        if (files_.bytes + bytes <= files_.limit && (files_.full_slot != self_ || key.dst != kResults)) return {};
        return Status::error(Code::LogFull, "the pretended log is full");
    }
    Status append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) override {
        LogFiles::Record record{tag, aux, {}, 0, position_};
        for (const auto& part : parts) record.payload.insert(record.payload.end(), part.begin(), part.end());
        if (auto s = make_room(key, record.payload.size()); !s) return s;
        files_.bytes += record.payload.size();
        record.crc = crc32c(record.payload.data(), record.payload.size());
        files_.streams[key].push_back(std::move(record));
        return {};
    }
    Status find(const LogKey& key, std::uint64_t seq, LogRecord* out) override {
        auto s = peek(key, seq, out);
        if (s && crc32c(out->payload.data(), out->payload.size()) != out->crc)
            s = Status::error(Code::LogCorrupt, "record " + std::to_string(seq) + " is damaged");
        return s;
    }
    Status peek(const LogKey& key, std::uint64_t seq, LogRecord* out) override {
        if (seq < first(key) || seq > last(key))
            return Status::error(Code::LogCorrupt, "there is no record " + std::to_string(seq));
        const auto& record = files_.streams[key][seq - 1];
        *out = {seq, record.tag, record.aux, record.crc, record.payload, record.position};
        return {};
    }
    // Shown to the other ranks of the host as they come; the record itself is made at the commit.
    Status append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                        ByteView piece, std::uint32_t* crc) override {
        auto& open = files_.open[key];
        if (at == 0) open.clear();
        open.insert(open.end(), piece.begin(), piece.end());
        return Log::append_piece(key, tag, aux, bytes, at, piece, crc);
    }
    std::byte* piece_room(const LogKey& key, std::uint64_t at, std::uint64_t bytes) override {
        const auto open = files_.open.find(key);
        if (open == files_.open.end() || open->second.size() != at) return nullptr;
        auto& room = rooms_[key];
        room.resize(bytes);
        return room.data();
    }
    Held hold(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) override {
        LogRecord record;
        const auto open = files_.open.find(key);
        if (seq > last(key) && open != files_.open.end()) record.payload = open->second;
        else if (!peek(key, seq, &record)) return {};
        if (at + bytes > record.payload.size()) return {};
        return {record.payload.subspan(at, bytes), std::make_shared<int>()};
    }
    Status commit_pieces(const LogKey& key) override {
        files_.open.erase(key);
        return Log::commit_pieces(key);
    }
    void abandon_pieces(const LogKey& key) override {
        files_.open.erase(key);
        Log::abandon_pieces(key);
    }
    Status read_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::span<std::byte> to,
                       std::uint32_t* crc) override {
        View view;
        if (auto s = view_pieces(key, seq, at, to.size(), &view); !s) return s;
        std::copy_n(view.bytes.begin(), to.size(), to.begin());
        *crc = crc32c(to.data(), to.size(), *crc);
        return {};
    }
    Status view_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes, View* out) override {
        if (files_.blind) return Status::error(Code::System, "it cannot be mapped");
        const auto& open = files_.open[key];
        LogRecord record;
        const auto from = seq <= last(key) ? (peek(key, seq, &record), record.payload) : ByteView(open);
        if (seq > last(key) + 1 || at + bytes > from.size()) return Status::error(Code::Invalid, "it is not there");
        out->bytes = from.subspan(at, bytes);
        out->stands = [] { return true; };
        return {};
    }
    bool shows_pieces() const override { return true; }
    // What a process of this slot was writing when it died never was.
    void recover() {
        std::erase_if(files_.open, [&](const auto& one) { return one.first.src == self_; });
    }
    bool readable(int slot) override { return readable_(slot); }
    bool lost() const override { return files_.lost; }
    Status skip(const LogKey& key, std::uint64_t through) override {
        auto& stream = files_.streams[key];
        if (!stream.empty()) return Status::error(Code::Internal, "a stream with records is to begin later");
        stream.resize(through);
        files_.collected[key] = through;
        return {};
    }
    void set_position(const LogPosition& position) override { position_ = position; }

private:
    bool own(const LogKey& key) const { return key.src == self_ || !readable_(key.src); }

    LogPosition position_;
    std::map<LogKey, Bytes> rooms_;  // of pieces that are coming
    LogFiles& files_;
    const int self_;
    std::function<bool(int)> readable_;
};

}  // namespace ftcomm
