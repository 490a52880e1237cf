// The pair log as the protocol sees it: for every ordered pair of ranks of a communicator one stream of numbered records that outlives the
// processes, and two more for each rank: what its collectives gave, and which of several answers it was given.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "base/bytes.h"
#include "base/crc32c.h"
#include "base/held.h"
#include "base/status.h"

namespace ftcomm {

// Ranks are job slots. `dst` of the streams that a rank writes for its own replacement:
inline constexpr int kResults = -1, kAnswers = -2, kMarks = -3, kFailures = -4, kHeard = -5, kNotes = -6;

struct LogKey {
    std::uint64_t comm = 0;
    std::int32_t src = 0, dst = 0;
    std::int32_t part = 0;  // 0 before the resume point, 1 after it
    auto operator<=>(const LogKey&) const = default;
};

// Of a message: where the program was. For people: nothing depends on it.
struct LogPosition {
    std::uint64_t iteration = 0;
    std::uint32_t micro_batch = 0;
};

struct LogRecord {
    std::uint64_t seq = 0;  // 1, 2, 3, ... without gaps
    std::int64_t tag = 0;
    std::uint64_t aux = 0;  // results: the operation's signature; answers: the rank that was matched
    std::optional<std::uint32_t> crc;  // CRC-32C of the payload; nothing: peek() found none, as it is not written yet
    ByteView payload;  // valid until the record is collected
    LogPosition position{};
};

// From this size on a message goes into a log past the caches: that costs no read of the old content, and throws out nothing. Below they
// have room, and another processor soon reads it.
inline constexpr std::size_t kLongMessage = 32u << 10;
// The same for one that is copied out of a log into its receiver's buffer: what it is copied from goes through the caches as well.
inline constexpr std::size_t kLongReceived = 512u << 10;

// One per rank. All calls come from the engine, one at a time. Implementations: files in shared memory (runtime), the simulator's hosts.
//
// Contract: a record that append() has returned ok for is there for every later incarnation of the rank on this host, whole, and is
// never written again. What was being appended when the process died is there whole or not at all.
class Log {
public:
    virtual ~Log() = default;

    // The last record and the oldest that has not been collected; 0 and 1 for an empty stream. Of streams whose `src` is this rank, or
    // readable(): looks again each time.
    virtual std::uint64_t last(const LogKey& key) = 0;
    virtual std::uint64_t first(const LogKey& key) = 0;
    // Why the stream cannot be used, where last() and first() say that it is empty; ok for one that is not there yet.
    virtual Status state(const LogKey& key) = 0;
    // Appends record last() + 1 with the parts as its payload; `src` is this rank, or `dst` is and `src` is not readable(): then it is this
    // host's half of the stream.
    virtual Status append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) = 0;
    // The next append to the stream, of so many bytes, will not fail for want of room.
    virtual Status make_room(const LogKey& key, std::uint64_t bytes) {
        (void)key, (void)bytes;
        return {};
    }
    // As append, for a reader that copies along: shown(n) when the first n bytes can be had by read_pieces(), for ever more of them. It does
    // nothing to this log.
    using Shown = std::function<void(std::uint64_t)>;
    virtual Status append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                                const Shown& shown);
    // Of the messages of this rank that are appended from now on.
    virtual void set_position(const LogPosition& position) { (void)position; }
    // The same with a payload that is made where it will be: make(to, at, bytes) writes bytes [at, at + bytes) of it to `to`, for one stretch
    // after the other, and does nothing else to the log but find and peek. If it fails there is no record. Who knows the checksum of all
    // that is made so far puts it into *sum, which is empty.
    using Make = std::function<Status(std::byte* to, std::uint64_t at, std::uint64_t bytes, std::optional<std::uint32_t>* sum)>;
    virtual Status append_made(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, const Make& make);
    // Checks what it returns: Code::LogCorrupt names the record.
    virtual Status find(const LogKey& key, std::uint64_t seq, LogRecord* out) = 0;
    // The same without a look at the payload: for who does not read it, or sends its checksum along.
    virtual Status peek(const LogKey& key, std::uint64_t seq, LogRecord* out) = 0;
    // No rank will look for records up to `through` any more, as far as this rank is concerned: it has written them, or has received them
    // and is past the checkpoint before the last.
    virtual Status collect(const LogKey& key, std::uint64_t through) = 0;
    // Whether this rank can read the streams that `slot` writes: it runs, or ran, on this host.
    virtual bool readable(int slot) = 0;
    // Processes of this rank have logged before this one, and not here: on another host, or on a disk that is empty now. What a rank has
    // lost stays lost for this folder; what is had again (communicator/restore.h) has a note of its own.
    virtual bool lost() const { return false; }
    // Of an empty stream that this rank writes: the next record is `through` + 1. Those before it are given up everywhere.
    virtual Status skip(const LogKey& key, std::uint64_t through);

    // As append, of a record of so many bytes that comes in pieces, in order, of which this one begins at `at`: crc is that of all up to its
    // end. It is in the log once all of it is committed; one that another is begun before the commit of never was. Until then nothing
    // else is appended to the stream.
    virtual Status append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                                ByteView piece, std::uint32_t* crc);
    // Where so many bytes of the record that is open may be put before append_piece gets them from there as its piece, if nothing else
    // comes between; null: nowhere in particular.
    virtual std::byte* piece_room(const LogKey& key, std::uint64_t at, std::uint64_t bytes) {
        (void)key, (void)at, (void)bytes;
        return nullptr;
    }
    virtual Status commit_pieces(const LogKey& key);  // of a result: synced, as by append
    // What came of it never was.
    virtual void abandon_pieces(const LogKey& key) { pieces_.erase(key); }
    // Bytes [at, at + to.size()) of record `seq` of a stream that another rank of this host writes in pieces, or has written: not checked.
    // Code::Invalid: they are not there (any more), as their writer has given the record up, or its successor has. crc goes on over them.
    virtual Status read_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::span<std::byte> to,
                               std::uint32_t* crc);
    // The same, where they lie: until the next call of this log. If whoever shows the record lets nothing else be written there before
    // all have left what they look at it for, they stay, also when others cannot find them any more: `stands` says so.
    struct View {
        ByteView bytes;
        std::function<bool()> stands;
    };
    virtual Status view_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes, View* out);
    // Whether these can see a record before its commit.
    virtual bool shows_pieces() const { return false; }

    // is_late(): append_later and append_held may write the record any time up to the end of the next flush(). For what can be had again
    // elsewhere if this process dies before, and nobody reads in another process. last() and find() know of it at once.
    virtual bool is_late() const { return false; }
    // Takes the payload's memory if it keeps it; scratch() gives memory to build one in.
    virtual Status append_later(const LogKey& key, std::int64_t tag, std::uint64_t aux, Bytes& payload) {
        const ByteView whole = payload;
        return append(key, tag, aux, std::span(&whole, 1));
    }
    virtual Bytes scratch(std::uint64_t bytes) {
        Bytes memory;
        memory.reserve(bytes);
        return memory;
    }
    // The payload stays where it is and as it is until `release` is called, once, unless this returns an error.
    virtual Status append_held(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload,
                               std::function<void()> release) {
        auto s = append(key, tag, aux, std::span(&payload, 1));
        if (s) release();
        return s;
    }
    // A piece of a record that is late goes out now. It is logged before or after, while it is in the cache, if all before it is.
    // crc: of the whole record, if it is in the log with this.
    virtual void append_sent(const LogKey& key, std::uint64_t seq, std::uint64_t at, ByteView piece,
                             std::optional<std::uint32_t>* crc) {
        (void)key, (void)seq, (void)at, (void)piece, (void)crc;
    }
    // Bytes [at, at + bytes) of a record of this rank, where they lie in the log; the rest of it need not be there yet. They are kept though the
    // record be collected meanwhile. Without `by`: copy them.
    virtual Held hold(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) {
        (void)key, (void)seq, (void)at, (void)bytes;
        return {};
    }
    virtual void release_all() {}  // now: what is not written yet is copied
    virtual Status flush() { return {}; }
    // What is committed piece by piece in a stream of this rank's own has to survive the host, and does after the next flush() only.
    virtual bool is_durable() const { return false; }

private:
    struct Pieces {
        std::int64_t tag = 0;
        std::uint64_t aux = 0;
        Bytes all;
        std::uint32_t crc = 0;
    };
    std::map<LogKey, Pieces> pieces_;
};

inline Status Log::skip(const LogKey&, std::uint64_t) { return Status::error(Code::Unsupported, "this log begins at 1"); }

inline Status Log::append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t, std::uint64_t at,
                                ByteView piece, std::uint32_t* crc) {
    auto& open = pieces_[key];
    if (at == 0) open = {tag, aux, {}, 0};
    open.all.insert(open.all.end(), piece.begin(), piece.end());
    *crc = open.crc = crc32c(piece.data(), piece.size(), open.crc);
    return {};
}

inline Status Log::append_made(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, const Make& make) {
    Bytes payload(bytes);
    std::optional<std::uint32_t> sum;
    if (auto s = make(payload.data(), 0, bytes, &sum); !s) return s;
    const ByteView whole = payload;
    return append(key, tag, aux, std::span(&whole, 1));
}

inline Status Log::append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                                const Shown& shown) {
    std::uint32_t crc = 0;
    for (std::uint64_t at = 0; at < payload.size();) {
        const auto piece = payload.subspan(at, std::min(stretch, payload.size() - at));
        if (auto s = append_piece(key, tag, aux, payload.size(), at, piece, &crc); !s) return s;
        at += piece.size();
        if (at < payload.size() && shows_pieces()) shown(at);
    }
    return commit_pieces(key);
}

inline Status Log::read_pieces(const LogKey&, std::uint64_t, std::uint64_t, std::span<std::byte>, std::uint32_t*) {
    return Status::error(Code::Unsupported, "this log shows no record before it is committed");
}

inline Status Log::view_pieces(const LogKey&, std::uint64_t, std::uint64_t, std::uint64_t, View*) {
    return Status::error(Code::Unsupported, "this log shows no record before it is committed");
}

inline Status Log::commit_pieces(const LogKey& key) {
    const auto whole = std::exchange(pieces_[key], {});
    const ByteView payload = whole.all;
    return append(key, whole.tag, whole.aux, std::span(&payload, 1));
}

}  // namespace ftcomm
