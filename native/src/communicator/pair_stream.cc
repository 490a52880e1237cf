// The sending side between hosts: records go in pieces, from the one that the receiver asks for.
#include <algorithm>

#include "base/copy.h"
#include "base/failpoint.h"
#include "communicator/logged_pairs.h"

namespace ftcomm {

namespace {

constexpr std::uint32_t kPiece = 128u << 10;

}  // namespace

std::uint32_t LoggedPairs::next_piece(int rank, std::uint64_t bytes) const {
    const auto left = bytes - peer(rank).wanted_offset;
    return static_cast<std::uint32_t>(std::min<std::uint64_t>({left, core_.sender.max_payload(), kPiece}));
}

// Of the record that the receiver wants next, from where it lies in the log if that can be. False: there is no room, or the log is broken.
bool LoggedPairs::send_piece(int rank, LogRecord record) {
    auto& p = peer(rank);
    const int slot = slot_of(rank);
    const auto key = to(rank);
    const auto bytes = record.payload.size();
    const auto at = p.wanted_offset;
    const auto n = next_piece(rank, bytes);
    auto h = header(FrameKind::LogPiece);
    h.seq = record.seq;
    h.step = static_cast<std::uint16_t>(log_.part_of(key, record.seq) | log_age(rank_) << 1);
    h.aux = static_cast<std::uint64_t>(record.tag);
    h.aux2 = bytes;
    const auto sum_up = [&] {
        h.flags = static_cast<std::uint8_t>((at == 0 ? kFirstPiece : 0) | (record.crc ? kSummedPiece : 0));
        h.attempt = record.crc.value_or(0);
    };
    Held held;
    if (core_.sender.sends_from(slot, n)) {
        if (!record.crc && p.later) log_.append_sent(key, record.seq, at, record.payload.subspan(at, n), &record.crc);
        held = log_.hold(key, record.seq, at, n);
    }
    if (held.by != nullptr) {
        sum_up();
        if (!core_.sender.send_from(slot, h, held)) return false;  // on_writable comes
    } else {
        auto* room = core_.sender.reserve(slot, n);
        if (room == nullptr) return false;
        // Again: if it could not be logged now, it may have been copied, and given back to its caller.
        if (record.seq <= log_.last(key) && !find_to_send(key, &record)) return false;
        copy_bytes(room, record.payload.data() + at, n);
        if (!record.crc && p.later) log_.append_sent(key, record.seq, at, {room, n}, &record.crc);
        sum_up();
        h.length = n;
        core_.sender.commit(slot, h);
    }
    FT_POINT("channel.piece");
    p.wanted_offset += n;
    if (p.wanted_offset < bytes) return true;
    ++p.wanted;
    p.wanted_offset = 0;
    return true;
}

// Looked for each time: where the payload is may change with every piece that is logged. The receiver checks it.
bool LoggedPairs::find_to_send(const LogKey& key, LogRecord* record) {
    auto s = log_.peek(key, record->seq, record);
    if (!s) broke(std::move(s));
    return s.ok();
}

// At most so many pieces; whether there are more that the transport has room for.
bool LoggedPairs::stream(int rank, int pieces) {
    auto& p = peer(rank);
    if (p.wanted == 0 || !reachable(rank)) return false;
    while (p.wanted <= log_.last(to(rank))) {
        if (pieces-- == 0) return true;
        LogRecord record;
        record.seq = p.wanted;
        if (!find_to_send(to(rank), &record) || !send_piece(rank, record)) return false;
    }
    return false;
}

// A long one goes out while it is logged, all but its end: without that it cannot be received, and what a replacement sends takes the place of
// what has come of it (L1).
Status LoggedPairs::log_streamed(ByteView payload, int dst, std::int64_t tag) {
    auto& p = peer(dst);
    LogRecord open;
    open.seq = log_.last(to(dst)) + 1;
    open.tag = tag;
    open.payload = payload;
    const auto stretches = std::min<std::uint64_t>(kPiece, stretch(payload.size()));
    auto status = log_.append_shown(to(dst), tag, 0, payload, stretches, [&](std::uint64_t logged) {
        while (p.wanted == open.seq && p.wanted_offset + next_piece(dst, payload.size()) <= logged && send_piece(dst, open))
            core_.host.trace("message.early_piece");
    });
    if (p.wanted == open.seq && log_.last(to(dst)) < open.seq) p.wanted_offset = 0;  // there is no such message
    return status;
}

bool LoggedPairs::work() {
    bool any = false;
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
        auto& p = peer(r);
        if (!p.later) continue;
        p.later = stream(r, 1);
        any |= p.later;
    }
    return any;
}

void LoggedPairs::on_writable(int slot) {
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
        if (slot_of(r) != slot) continue;
        peer(r).later = true;
        (void)stream(r, kAllPieces);
        peer(r).later = false;
    }
}

}  // namespace ftcomm
