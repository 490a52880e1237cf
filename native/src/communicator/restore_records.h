// What a rank that has lost its log and the other ranks say to each other.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "channel/log.h"

namespace ftcomm {

// Streams of which the other side has a copy, or the original, as seen by the rank that has lost its own.
enum class LostStream : std::uint8_t { Results = 0, Received = 1, Sent = 2, RingReceived = 3, RingSent = 4 };
inline constexpr int kLostStreams = 5;

struct RestoreAsk {
    bool records = false;  // else: how things stand
    LostStream stream = LostStream::Results;
    std::uint8_t part = 0;  // of the log (channel/phased_log.h)
    std::uint64_t seq = 0, offset = 0;  // in that part

    void encode(ByteWriter& w) const { w.put(static_cast<std::uint8_t>(records)).put(stream).put(part).put(seq).put(offset); }
    static RestoreAsk decode(ByteReader& r) {
        RestoreAsk a;
        a.records = r.get<std::uint8_t>() != 0;
        a.stream = r.get<LostStream>();
        a.part = r.get<std::uint8_t>();
        a.seq = r.get<std::uint64_t>();
        a.offset = r.get<std::uint64_t>();
        return a;
    }
};

struct RestoreState {
    bool lost = false;  // it has lost its own log, too, and has not got it back
    bool none = false;  // but no process of it had this communicator, so nothing of that was in there
    bool older = false;  // what the receiver voted with is an older log than the one that its rank has written last
    bool readable = false;  // it reads the lost rank's streams where they are: they were on one host
    std::uint64_t logged = 0, done = 0;  // its results; complete, as far as it knows
    bool early_answers = false;  // see LoggedPairs::Heard
    std::uint64_t newest_answers = 0;
    std::uint64_t first_mark = 1;
    std::vector<Bytes> marks;
    std::array<std::array<std::uint64_t, 2>, kLostStreams> last{};  // by stream and part

    // An operation, a checkpoint, or a message of the one who asks: the communicator was there before that lost its log.
    bool has_history() const {
        const auto any = [this](LostStream s) { return last[static_cast<std::size_t>(s)] != std::array<std::uint64_t, 2>{}; };
        return logged > 0 || !marks.empty() || any(LostStream::Sent) || any(LostStream::RingSent);
    }
    std::uint64_t last_mark() const { return first_mark + marks.size() - 1; }
    void encode(ByteWriter& w) const {
        w.put(static_cast<std::uint8_t>(lost))
            .put(static_cast<std::uint8_t>(none))
            .put(static_cast<std::uint8_t>(older))
            .put(static_cast<std::uint8_t>(readable))
            .put(logged)
            .put(done);
        w.put(static_cast<std::uint8_t>(early_answers)).put(newest_answers).put(first_mark);
        w.put(static_cast<std::uint32_t>(marks.size()));
        for (const auto& m : marks) w.bytes(m);
        for (const auto& parts : last)
            for (auto n : parts) w.put(n);
    }
    static RestoreState decode(ByteReader& r) {
        RestoreState s;
        s.lost = r.get<std::uint8_t>() != 0;
        s.none = r.get<std::uint8_t>() != 0;
        s.older = r.get<std::uint8_t>() != 0;
        s.readable = r.get<std::uint8_t>() != 0;
        s.logged = r.get<std::uint64_t>();
        s.done = r.get<std::uint64_t>();
        s.early_answers = r.get<std::uint8_t>() != 0;
        s.newest_answers = r.get<std::uint64_t>();
        s.first_mark = r.get<std::uint64_t>();
        s.marks.resize(r.count(4));
        for (auto& m : s.marks) {
            const auto bytes = r.bytes();
            m.assign(bytes.begin(), bytes.end());
        }
        for (auto& parts : s.last)
            for (auto& n : parts) n = r.get<std::uint64_t>();
        return s;
    }
};

// A record, or a part of it.
struct RestoredPiece {
    std::uint64_t seq = 0, offset = 0, total = 0, aux = 0;
    std::int64_t tag = 0;
    std::uint32_t crc = 0;  // of the whole
    ByteView data;

    static constexpr std::size_t kHead = 48;  // encoded, without the data
    void encode(ByteWriter& w) const { w.put(seq).put(offset).put(total).put(aux).put(tag).put(crc).bytes(data); }
    static RestoredPiece decode(ByteReader& r) {
        RestoredPiece p;
        p.seq = r.get<std::uint64_t>();
        p.offset = r.get<std::uint64_t>();
        p.total = r.get<std::uint64_t>();
        p.aux = r.get<std::uint64_t>();
        p.tag = r.get<std::int64_t>();
        p.crc = r.get<std::uint32_t>();
        p.data = r.bytes();
        return p;
    }
};

}  // namespace ftcomm
