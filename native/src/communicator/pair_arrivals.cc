// The receiving side between hosts: asks for records, and puts their pieces together in this host's half of the log.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/copy.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "communicator/logged_pairs.h"

namespace ftcomm {

// Asks a rank of another host for its records, once for each of its incarnations.
void LoggedPairs::want(int rank) {
    auto& p = peer(rank);
    if (!reachable(rank) || is_direct(rank) || p.asked == incarnation(rank) || core_.solo || !log_.reading() ||
        log_.readable(slot_of(rank)))
        return;
    p.asked = incarnation(rank);
    look(rank);  // of what is in this host's half nothing is asked for
    p.open = 0;
    auto h = header(FrameKind::LogWant);
    h.seq = p.seen + 1;
    core_.sender.send(slot_of(rank), h);
}

// The receive that it is for, if that is known already, gets it piece by piece; the log gets it whole.
void LoggedPairs::begin_message(int rank, const FrameHeader& h) {
    auto& p = peer(rank);
    p.open = h.seq;
    p.arrived = 0;
    p.into = nullptr;
    const auto fits = [&](const Recv& r) { return r.tag == static_cast<std::int64_t>(h.aux) && (r.src < 0 || r.src == rank); };
    const auto it = std::find_if(recvs_.begin(), recvs_.end(), fits);
    if (it == recvs_.end() || it->src < 0 || it->data == nullptr || it->capacity < h.aux2)
        return;  // one from anyone may be answered by another yet
    p.into = it->request;
    p.into_data = it->data;
}

// All but the first piece: straight into the log, where on_piece finds it.
std::byte* LoggedPairs::place(int rank, const FrameHeader& h) {
    const auto& p = peer(rank);
    if (h.seq != p.open || h.seq != p.seen + 1 || (h.flags & kFirstPiece) != 0 || !broken_ || h.step >> 1 < log_age(rank) ||
        (h.step & 1) != log_.part_of(from(rank), h.seq) || p.arrived + h.length > h.aux2)
        return nullptr;
    return log_.piece_room(from(rank), p.arrived, h.length);
}

void LoggedPairs::on_piece(int rank, const FrameHeader& h, ByteView payload) {
    auto& p = peer(rank);
    if (h.seq != p.seen + 1 || !broken_) return;  // L1: of what is here already
    if (h.step >> 1 < log_age(rank)) return;  // from an older log, which the vote will find out
    if ((h.step & 1) != log_.part_of(from(rank), h.seq)) {
        p.early = true;  // the sender is past its resume point, this rank is not: asked for again then
        return;
    }
    if ((h.flags & kFirstPiece) != 0) begin_message(rank, h);
    else if (p.open != h.seq) return;  // its first piece came too early
    FT_CHECK(h.seq == log_.last(from(rank)) + 1, "message %llu, after %llu in the log", static_cast<unsigned long long>(h.seq),
             static_cast<unsigned long long>(log_.last(from(rank))));
    const auto at = p.arrived;
    FT_CHECK(at + payload.size() <= h.aux2, "%zu bytes of a message of %llu", static_cast<std::size_t>(at) + payload.size(),
             static_cast<unsigned long long>(h.aux2));
    const auto tag = static_cast<std::int64_t>(h.aux);
    std::uint32_t crc = 0;
    if (auto s = log_.append_piece(from(rank), tag, 0, h.aux2, at, payload, &crc); !s) {
        broke(std::move(s));
        return;
    }
    if (p.into != nullptr && !p.into->done.load(std::memory_order_relaxed) && !payload.empty())
        copy(p.into_data + at, payload.data(), payload.size(), into_for(h.aux2));
    p.arrived += payload.size();
    if (p.arrived < h.aux2) return;
    end_message(rank, h, crc);
}

// In this host's half, and so seen by a receive, only if it is what the sender's log says; else it stays without a commit.
void LoggedPairs::end_message(int rank, const FrameHeader& h, std::uint32_t crc) {
    auto& p = peer(rank);
    if ((h.flags & kSummedPiece) != 0 && crc != h.attempt) {
        broke(Status::error(Code::LogCorrupt, "message #" + std::to_string(h.seq) + " from rank " + std::to_string(rank) +
                                                  " of communicator " + spec_.name + " is damaged in its sender's log: its " +
                                                  std::to_string(h.aux2) + " bytes were logged with the CRC-32C " +
                                                  crc_text(h.attempt) + ", and have " + crc_text(crc)));
        return;
    }
    if (auto s = log_.commit_pieces(from(rank)); !s) {
        broke(std::move(s));
        return;
    }
    FT_POINT("channel.arrived");
    look(rank);
    match();
    p.into = nullptr;
    p.open = 0;
}

}  // namespace ftcomm
