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

// Of the record that the receiver wants next. False: there is no room.
bool LoggedPairs::send_piece(int rank, const LogRecord& record) {
    auto& p = peer(rank);
    const int slot = slot_of(rank);
    const auto bytes = record.payload.size();
    const auto n = next_piece(rank, bytes);
    auto* room = core_.sender.reserve(slot, n);
    if (room == nullptr) return false;  // on_writable comes
    copy_bytes(room, record.payload.data() + p.wanted_offset, n);
    auto sum = record.crc;
    if (!sum && p.later) log_.append_sent(to(rank), record.seq, p.wanted_offset, {room, n}, &sum);
    auto h = header(FrameKind::LogPiece);
    h.seq = record.seq;
    h.step = static_cast<std::uint16_t>(log_.part_of(to(rank), record.seq) | log_age(rank_) << 1);
    h.flags = static_cast<std::uint8_t>((p.wanted_offset == 0 ? kFirstPiece : 0) | (sum ? kSummedPiece : 0));
    h.attempt = sum.value_or(0);
    h.aux = static_cast<std::uint64_t>(record.tag);
    h.aux2 = bytes;
    h.length = n;
    core_.sender.commit(slot, h);
    FT_POINT("channel.piece");
    p.wanted_offset += n;
    if (p.wanted_offset < bytes) return true;
    ++p.wanted;
    p.wanted_offset = 0;
    return true;
}

// At most so many pieces; whether there are more that the transport has room for. `newest`: the payload of the last record, nearer than there.
bool LoggedPairs::stream(int rank, int pieces, ByteView newest) {
    auto& p = peer(rank);
    if (p.wanted == 0 || !reachable(rank)) return false;
    while (p.wanted <= log_.last(to(rank))) {
        if (pieces-- == 0) return true;
        LogRecord record;  // looked for each time: where the payload is may change with every piece that is logged
        if (auto s = log_.peek(to(rank), p.wanted, &record); !s) {  // the receiver checks it
            broke(std::move(s));
            return false;
        }
        if (!newest.empty() && p.wanted == log_.last(to(rank))) record.payload = newest;
        if (!send_piece(rank, record)) return false;
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
    auto status = log_.append_shown(to(dst), tag, 0, payload, stretch(payload.size()), [&](std::uint64_t logged) {
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
