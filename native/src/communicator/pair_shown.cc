// A large message on one host: its receiver copies it out of the log while its sender still writes it there.
#include <algorithm>

#include "base/crc32c.h"
#include "base/failpoint.h"
#include "communicator/logged_pairs.h"

namespace ftcomm {

// A frame for each stretch, so that a receiver that sleeps is woken, and one that does not finds it in the cache.
Status LoggedPairs::log_shown(ByteView payload, int dst, std::int64_t tag) {
    auto h = header(FrameKind::LogShown);
    h.seq = log_.last(to(dst)) + 1;
    h.step = static_cast<std::uint16_t>(log_.part_of(to(dst), h.seq));
    h.aux = static_cast<std::uint64_t>(tag);
    h.aux2 = payload.size();
    return log_.append_shown(to(dst), tag, 0, payload, stretch(payload.size()), [&](std::uint64_t) {
        ++h.attempt;
        core_.sender.send(slot_of(dst), h);
        FT_POINT("channel.shown");
    });
}

// It is received when it is committed, like any other: until then its sender may die, and what its replacement writes is the same, or has
// another checksum.
void LoggedPairs::on_shown(int rank, const FrameHeader& h) {
    auto& p = peer(rank);
    if (h.seq != p.seen + 1 || !broken_ || !log_.readable(slot_of(rank)) || (h.step & 1) != log_.part_of(from(rank), h.seq) ||
        (log_.is_split() && !log_.reading()))
        return;
    // Another process writes it, and it need not be the same message: nothing of that was ever received.
    const bool again = p.shown.seq == h.seq && (p.shown.attempt >= h.attempt || p.shown.aux != h.aux || p.shown.aux2 != h.aux2);
    if (again && p.open == h.seq) p.open = 0;
    p.shown = h;
    follow(rank);
}

// Into a receive that waits for it.
void LoggedPairs::follow(int rank) {
    auto& p = peer(rank);
    const auto& h = p.shown;
    if (h.seq != p.seen + 1 || !log_.readable(slot_of(rank))) return;
    if (p.open != h.seq || p.into == nullptr || p.into->done.load(std::memory_order_relaxed)) {
        begin_message(rank, h);
        p.shown_crc = 0;
    }
    const auto there = std::min(h.attempt * stretch(h.aux2), h.aux2);
    if (p.into == nullptr || there <= p.arrived) return;
    const std::span<std::byte> next(p.into_data + p.arrived, there - p.arrived);
    if (log_.read_pieces(from(rank), h.seq, p.arrived, next, &p.shown_crc)) {
        p.arrived = there;
    } else {  // it is copied when it is committed
        p.into = nullptr;
        p.shown.seq = 0;
    }
}

// Of a message that is committed now: false if it has to be copied as a whole after all.
bool LoggedPairs::copy_rest(Recv& r, int src, std::uint64_t seq) {
    auto& p = peer(src);
    LogRecord record;
    if (!log_.peek(from(src), seq, &record) || p.arrived > record.payload.size() || record.payload.size() > r.capacity)
        return false;
    const auto rest = record.payload.subspan(p.arrived);
    return crc32c_copy(r.data + p.arrived, rest.data(), rest.size(), p.shown_crc,
                       into_for(record.payload.size(), kLongReceived)) == record.crc;
}

}  // namespace ftcomm
