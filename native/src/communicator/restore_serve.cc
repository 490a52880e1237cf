// The other side of restore.h: what this rank has of a log that another one has lost.
#include <algorithm>
#include <cstring>
#include <memory>

#include "base/crc32c.h"
#include "base/failpoint.h"
#include "collectives/results.h"
#include "communicator/lost_logs.h"

namespace ftcomm {

namespace {

constexpr std::uint64_t kReply = 512u << 10;  // bytes in an answer: what is queued for a link that is slow

// What another rank can use of a result: all of it, or which operation it was of.
ByteView usable(const LogRecord& record) {
    const bool whole = record.tag == ResultStream::kFailed || record.tag == static_cast<std::int64_t>(OpKind::AllReduce) ||
                       record.tag == static_cast<std::int64_t>(OpKind::Broadcast) ||
                       record.tag == static_cast<std::int64_t>(OpKind::AllGather);
    return whole ? record.payload : record.payload.first(std::min(record.payload.size(), ResultStream::kHead));
}

}  // namespace

LogKey Communicator::LostLogs::key_of(LostStream stream, int part, int lost, int other) const {
    using Channel = LoggedPairs::Channel;
    LogKey key;
    switch (stream) {
        case LostStream::Results: key = {spec_.id, other, kResults}; break;
        case LostStream::Received: key = LoggedPairs::key(spec_, Channel::Messages, other, lost); break;
        case LostStream::Sent: key = LoggedPairs::key(spec_, Channel::Messages, lost, other); break;
        case LostStream::RingReceived: key = LoggedPairs::key(spec_, Channel::Ring, other, lost); break;
        case LostStream::RingSent: key = LoggedPairs::key(spec_, Channel::Ring, lost, other); break;
    }
    key.part = part;
    return key;
}

void Communicator::LostLogs::on_ask(int rank, ByteView body) {
    ByteReader r(body);
    const auto asked = RestoreAsk::decode(r);
    if (!r.done()) return;
    ByteWriter w;
    asked.encode(w);
    if (asked.records) put_records(rank, asked, w);
    else put_state(rank, w);
    FT_POINT("restore.reply");
    core_.sender.send_long(comm_.slot_of(rank), comm_.control(FrameKind::RestoreReply), w.take());
}

void Communicator::LostLogs::put_state(int rank, ByteWriter& w) {
    auto& log = *core_.config.log;
    const int lost = comm_.slot_of(rank);
    RestoreState s;
    s.lost = comm_.restore_ != nullptr;
    s.none = s.lost && core_.beyond_others;
    s.readable = log.readable(lost);
    if (!s.lost) {
        s.logged = comm_.logged_whole();
        s.done = std::max({comm_.done_seq_, comm_.served_, comm_.decision_.done_through});
        const auto heard = comm_.pairs_->heard_of(rank);
        s.early_answers = heard.early;
        s.newest_answers = heard.newest;
        s.first_mark = log.first(comm_.note_key(kMarks));
        LogRecord record;
        for (auto n = s.first_mark; n <= log.last(comm_.note_key(kMarks)); ++n) {
            if (!log.find(comm_.note_key(kMarks), n, &record)) break;
            s.marks.emplace_back(record.payload.begin(), record.payload.end());
        }
        for (int stream = 0; stream < kLostStreams; ++stream)
            for (int part : {0, 1})
                s.last[static_cast<std::size_t>(stream)][static_cast<std::size_t>(part)] =
                    log.last(key_of(static_cast<LostStream>(stream), part, lost, core_.self()));
    }
    s.encode(w);
}

// A result of which each rank of this host has logged a share, as one that has no others on its host logs it.
std::shared_ptr<const Bytes> Communicator::LostLogs::whole_result(std::uint64_t seq, const LogRecord& share) {
    if (whole_ != nullptr && whole_seq_ == seq) return whole_;
    auto last = comm_.last_from_log(seq);
    if (last.seq != seq || !last.logged) return nullptr;
    auto whole = std::make_shared<Bytes>(ResultStream::kHead + shared_bytes(last.desc, spec_.members.size()));
    std::memcpy(whole->data(), share.payload.data(), ResultStream::kHead);
    last.desc.recv = whole->data() + ResultStream::kHead;
    OpState op(seq, last.desc, last.shape, last.grid, rank_, comm_.calls_.signature_of(last.shape), nullptr);
    if (!comm_.results_->read(op)) {  // not all of them have logged it
        if (comm_.last_.seq != seq || !comm_.retains_result()) return nullptr;
        comm_.keep_apart();
        if (comm_.last_.kept == nullptr) return nullptr;  // what should be there cannot be read
        std::memcpy(last.desc.recv, comm_.last_.kept->data(), comm_.last_.kept->size());
    }
    whole_seq_ = seq;
    return whole_ = std::move(whole);
}

// As much as goes into one answer, from the place that was asked for; nothing, where this log ends before it.
void Communicator::LostLogs::put_records(int rank, const RestoreAsk& asked, ByteWriter& w) {
    auto& log = *core_.config.log;
    const auto key = key_of(asked.stream, asked.part, comm_.slot_of(rank), core_.self());
    const bool results = asked.stream == LostStream::Results;
    std::vector<RestoredPiece> pieces;
    std::vector<std::shared_ptr<const Bytes>> held;
    std::uint64_t bytes = 0, offset = asked.offset;
    for (auto seq = asked.seq; seq <= log.last(key) && bytes < kReply; ++seq, offset = 0) {
        LogRecord record;
        if (!log.peek(key, seq, &record)) break;  // the one who asked for it finds it missing
        if (results && record.tag >= ResultStream::kShare) {
            held.push_back(whole_result(seq + (asked.part == 1 ? comm_.log_->base(comm_.note_key(kResults)) : 0), record));
            if (held.back() == nullptr) {
                ByteReader head(record.payload);
                if (Shape::decode(head).algorithm == Algorithm::Flat)
                    pieces.push_back({seq, 0, 0, record.aux, ResultStream::kUndone, 0, {}});
                break;
            }
            record.payload = *held.back();
            record.tag %= ResultStream::kShare;
            record.crc.reset();
        }
        const auto all = results ? usable(record) : record.payload;
        RestoredPiece piece{seq, offset, all.size(), record.aux, record.tag, 0, {}};
        piece.crc = record.crc && all.size() == record.payload.size() ? *record.crc : crc32c(all.data(), all.size());
        piece.data = all.subspan(std::min<std::uint64_t>(offset, all.size()));
        piece.data = piece.data.first(std::min<std::uint64_t>(piece.data.size(), kReply));
        bytes += piece.data.size() + RestoredPiece::kHead;
        pieces.push_back(piece);
        if (piece.offset + piece.data.size() < piece.total) break;
    }
    w.put(static_cast<std::uint32_t>(pieces.size()));
    for (const auto& piece : pieces) piece.encode(w);
}

}  // namespace ftcomm
