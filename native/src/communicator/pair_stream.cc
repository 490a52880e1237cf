// The sending side between hosts: records go in pieces, from the one that the receiver asks for.
#include <algorithm>

#include "base/copy.h"
#include "base/failpoint.h"
#include "communicator/logged_pairs.h"

namespace ftcomm {

namespace {

constexpr std::uint32_t kPiece = 128u << 10;

}  // namespace

// At most so many pieces; whether there are more that the transport has room for.
bool LoggedPairs::stream(int rank, int pieces) {
    auto& p = peer(rank);
    if (p.wanted == 0 || !reachable(rank)) return false;
    const int slot = slot_of(rank);
    while (p.wanted <= log_.last(to(rank))) {
        if (pieces-- == 0) return true;
        LogRecord record;  // looked for each time: where the payload is may change with every piece that is logged
        if (auto s = log_.peek(to(rank), p.wanted, &record); !s) {  // the receiver checks it
            broke(std::move(s));
            return false;
        }
        const auto bytes = record.payload.size();
        const auto n =
            static_cast<std::uint32_t>(std::min<std::uint64_t>({bytes - p.wanted_offset, core_.sender.max_payload(), kPiece}));
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
        if (p.wanted_offset < bytes) continue;
        ++p.wanted;
        p.wanted_offset = 0;
    }
    return false;
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
