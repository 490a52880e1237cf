#include "communicator/result_stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/copy.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "collectives/results.h"

namespace ftcomm {

namespace {

constexpr auto kFailed = ResultStream::kFailed, kShare = ResultStream::kShare;
constexpr auto kHead = ResultStream::kHead;
constexpr int kAmong = 16;

std::int64_t tag_of_share(const std::vector<int>& ranks) {
    ByteWriter w;
    for (int rank : ranks) w.put(static_cast<std::int32_t>(rank));
    const auto list = w.take();
    return kShare | static_cast<std::int64_t>(crc32c(list.data(), list.size())) << kAmong;
}
bool is_share(const LogRecord& record) { return record.tag >= kShare; }

// No record may be missing between two.
Status was_full() {
    return Status::error(Code::LogFull, "the log was full and lacks earlier results; start again from a checkpoint");
}

// Copies the data of a record into the pieces, whose total it must have.
bool fill(const std::vector<std::span<std::byte>>& pieces, const LogRecord& record) {
    std::size_t bytes = kHead;
    for (const auto& p : pieces) bytes += p.size();
    if (record.payload.size() != bytes) return false;
    auto from = record.payload.subspan(kHead);
    for (const auto& p : pieces) {
        copy_bytes(p.data(), from.data(), p.size());
        from = from.subspan(p.size());
    }
    return true;
}

}  // namespace

const std::array<std::byte, kHead>& ResultStream::head_of(const OpState& op) {
    if (!headed_ || !(*headed_ == op.shape)) {
        ByteWriter w;
        op.shape.encode(w);
        const auto used = w.view();
        FT_CHECK(used.size() + sizeof op.seq <= kHead, "the head of a result takes %zu bytes", used.size() + sizeof op.seq);
        head_ = {};
        std::memcpy(head_.data(), used.data(), used.size());
        number_at_ = used.size();
        headed_ = op.shape;
    }
    std::memcpy(head_.data() + number_at_, &op.seq, sizeof op.seq);
    return head_;
}

Elements ResultStream::share_of(const OpState& op) {
    const auto count = shared_elements(op.desc, op.shape.blocks);
    if (count != shared_count_) {
        shared_count_ = count;
        share_ = equal_part(count, fellows_, rank_);
    }
    return share_;
}

void ResultStream::look_at_hosts() {
    abandon_share();
    shared_count_ = 0;
    share_ = {};
    fellows_.clear();
    for (int rank = 0; rank < size(); ++rank)
        if (rank == rank_ || log_.readable(spec_.members[static_cast<std::size_t>(rank)])) fellows_.push_back(rank);
    share_tag_ = tag_of_share(fellows_);
}

bool ResultStream::shares(const OpState& op) const {
    return fellows_.size() > 1 && op.grid.segments() > 0 && op.shape.shares_finals();
}

Status ResultStream::make_room(const OpState& op) {
    if (op.seq <= last_) return {};
    if (op.seq != last_ + 1) return was_full();
    const auto bytes =
        shares(op) ? share_of(op).count * size_of(op.desc.dtype) : shared_bytes(op.desc, static_cast<std::size_t>(size()));
    return log_.make_room(key(rank_), kHead + bytes);
}

bool ResultStream::is_whole(std::uint64_t seq) {
    LogRecord record;
    if (!log_.peek(key(rank_), seq, &record) || !is_share(record)) return true;
    ByteReader r(record.payload);
    if (Shape::decode(r).algorithm != Algorithm::Flat) return true;
    return std::all_of(fellows_.begin(), fellows_.end(), [&](int rank) { return log_.last(key(rank)) >= seq; });
}

bool ResultStream::shared_here(const LogRecord& record) const { return record.tag >> kAmong == share_tag_ >> kAmong; }

std::vector<std::span<std::byte>> ResultStream::pieces(const OpState& op, int rank, bool share) const {
    return share ? shared_pieces(op, fellows_, rank, size()) : result_pieces(op, rank, size());
}

bool ResultStream::begin_share(const OpState& op) {
    abandon_share();
    if (!log_.shows_pieces() || !shares(op) || static_cast<int>(fellows_.size()) != size() || op.seq != last_ + 1) return false;
    const auto parts = pieces(op, rank_, true);
    if (parts.size() != 1) return false;
    begun_ = op.seq;
    bytes_ = kHead + parts[0].size();
    put_ = 0;
    tag_ = static_cast<std::int64_t>(op.shape.runs_as()) | share_tag_;
    aux_ = op.signature;
    return put_in_share(head_of(op));
}

bool ResultStream::put_in_share(ByteView piece) {
    std::uint32_t crc = 0;
    // A full log is told of when all of it is to be logged.
    if (begun_ != 0 && log_.append_piece(key(rank_), tag_, aux_, bytes_, put_, piece, &crc)) {
        put_ += piece.size();
        return true;
    }
    abandon_share();
    return false;
}

void ResultStream::abandon_share() {
    if (std::exchange(begun_, 0) != 0) log_.abandon_pieces(key(rank_));
}

Status ResultStream::view_share(const OpState& op, int rank, std::uint64_t at, std::uint64_t bytes, Log::View* out) {
    return log_.view_pieces(key(rank), op.seq, kHead + at, bytes, out);
}

Status ResultStream::add(const OpState& op) {
    if (begun_ == op.seq && put_ == bytes_) {
        begun_ = 0;
        FT_POINT("result.before");
        auto s = log_.commit_pieces(key(rank_));
        FT_POINT("result.after");
        if (s) last_ = op.seq;
        return s;
    }
    abandon_share();
    const auto& head = head_of(op);
    if (op.seq <= last_) return compare(op, head);
    if (op.seq != last_ + 1) return was_full();
    const bool share = shares(op);
    const auto tag = static_cast<std::int64_t>(op.shape.runs_as()) | (share ? share_tag_ : 0);
    const auto append = [&](std::span<const ByteView> parts) { return log_.append(key(rank_), tag, op.signature, parts); };
    const auto append_pieces = [&] {
        const auto data = pieces(op, rank_, share);
        std::vector<ByteView> parts;
        parts.reserve(1 + data.size());
        parts.emplace_back(head);
        for (const auto& piece : data) parts.emplace_back(piece);
        return append(parts);
    };
    FT_POINT("result.before");
    auto s = share && op.shape.algorithm == Algorithm::Flat  // the small ones, in as little time as can be
                 ? append(std::array<ByteView, 2>{head, bytes_of(op, share_of(op))})
                 : append_pieces();
    FT_POINT("result.after");
    if (s) last_ = op.seq;
    return s;
}

Status ResultStream::compare(const OpState& op, ByteView head) {
    LogRecord record;
    if (auto s = log_.find(key(rank_), op.seq, &record); !s) return s;
    auto rest = record.payload;
    bool same = record.tag != kFailed && record.aux == op.signature;
    const auto next_is = [&](ByteView part) {
        same = same && rest.size() >= part.size() && (part.empty() || std::memcmp(rest.data(), part.data(), part.size()) == 0);
        if (same) rest = rest.subspan(part.size());
    };
    next_is(head);
    const bool share = is_share(record);
    same = same && (!share || shared_here(record));
    for (const auto& piece : pieces(op, rank_, share)) next_is(piece);
    if (same && rest.empty()) return {};
    return Status::error(Code::ReplayDiverged, op.shape.text() + " #" + std::to_string(op.seq) + " of communicator " +
                                                   spec_.name + " gave another result than before");
}

Status ResultStream::add_failure(const OpState& op, const Cause& cause) {
    abandon_share();
    ByteWriter w;
    cause.encode(w);
    const auto body = w.take();
    const auto& head = head_of(op);
    const ByteView parts[] = {head, body};
    auto s = log_.append(key(rank_), kFailed, op.signature, parts);
    if (s) last_ = op.seq;
    return s;
}

std::optional<ResultStream::Entry> ResultStream::entry(std::uint64_t seq) {
    LogRecord record;
    if (!log_.find(key(rank_), seq, &record)) return std::nullopt;
    ByteReader r(record.payload);
    return Entry{Shape::decode(r), record.tag == kFailed};
}

Status ResultStream::read(OpState& op) {
    LogRecord record;
    if (auto s = log_.find(key(rank_), op.seq, &record); !s) return s;
    const bool same = record.aux == op.signature;
    if (same && record.tag == kFailed) {
        ByteReader r(record.payload.subspan(kHead));
        return Cause::decode(r).status("");
    }
    if (same && is_share(record)) return read_shares(op);
    if (same && fill(pieces(op, rank_, false), record)) return {};
    ByteReader r(record.payload);
    const auto was = Shape::decode(r).text(), name = "operation #" + std::to_string(op.seq) + " of communicator " + spec_.name;
    if (was == op.shape.text())
        return Status::error(Code::ReplayDiverged, name + ", " + was +
                                                       ", was done by another algorithm: start with the options that it had "
                                                       "(FTCOMM_FLAT_LIMIT, FTCOMM_SEGMENT_BYTES), or with a fresh log");
    return Status::error(
        Code::ReplayDiverged,
        name + " was " + was + ", and is now " + op.shape.text() +
            ": the program does not do the same again. Seed its generators, take no decision from time or thread "
            "order, and use ftcomm.recovery.deterministic()");
}

// All of them are there, or it is not served; and nobody collects what another rank's replacement may still read.
Status ResultStream::read_shares(OpState& op) {
    const auto& head = head_of(op);
    for (int rank : fellows_) {
        LogRecord record;
        if (log_.last(key(rank)) < op.seq)  // looks again
            return Status::error(Code::LogCorrupt, "rank " + std::to_string(rank) + "'s share of operation #" +
                                                       std::to_string(op.seq) + " of communicator " + spec_.name +
                                                       " is not in the log: it has been removed or is from another run");
        if (auto s = log_.find(key(rank), op.seq, &record); !s) return s;
        if (record.payload.size() < kHead || std::memcmp(record.payload.data(), head.data(), kHead) != 0)
            return Status::error(
                Code::ReplayDiverged,
                "rank " + std::to_string(rank) + " has logged something else as operation #" + std::to_string(op.seq) +
                    " of communicator " + spec_.name +
                    ": all ranks must call resume() after the same collectives, and the same collectives after it");
        const bool share = is_share(record);
        if (share && !shared_here(record))
            return Status::error(Code::LogCorrupt,
                                 "rank " + std::to_string(rank) + " has shared operation #" + std::to_string(op.seq) +
                                     " of communicator " + spec_.name +
                                     " with other ranks than are on this host now: start the ranks on the hosts where they were");
        if (!fill(pieces(op, rank, share), record))
            return Status::error(Code::LogCorrupt, "rank " + std::to_string(rank) + "'s share of operation #" +
                                                       std::to_string(op.seq) + " has another size than it should");
        if (!share) return {};  // that rank logs everything
    }
    return {};
}

}  // namespace ftcomm
