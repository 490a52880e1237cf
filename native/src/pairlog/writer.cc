#include "pairlog/writer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include "base/random.h"

namespace ftcomm::pairlog {
namespace {

constexpr auto kRelease = std::memory_order_release;
constexpr std::uint64_t kLongest = 128ull << 30;   // a segment notes places in 32 bits
constexpr std::uint64_t kFetched = 1u << 10;
constexpr std::uint64_t kChunk =
    128u << 10;   // a reader copies one while the next one is written; summed apart, as it may be sent by itself (hold)

}  // namespace

StreamWriter::~StreamWriter() {
    if (payload_ != nullptr) abandon();
    std::lock_guard lock(dir_.mutex_);
    std::erase(dir_.writers_, this);
    // The segments stay on disk, but they are no longer this process's to spill or to count.
    for (const auto& segment : segments_) {
        if (segment->spilled) dir_.spilled_ -= segment->file_size;
        else dir_.resident_ -= segment->file_size;
    }
}

Status StreamWriter::place(const RecordInfo& info) {
    FT_CHECK(payload_ == nullptr, "record %llu of a log is begun while one is open", static_cast<unsigned long long>(last_ + 1));
    if (auto status = make_room(info.length); !status) return status;
    info_ = info;
    info_.seq = last_ + 1;
    info_.crc = 0;
    published_ = 0;
    newest_part_ = {};
    const Segment& segment = *segments_.back();
    payload_ = segment.at(segment.end()) + sizeof(RecordHeader);
    // A reader that sees any of this sees the generation of the last abandon as well.
    std::atomic_thread_fence(kRelease);
    // Also where it is not opened: which segments there were is known by this when all of them are gone.
    index_->open_ordinal.store(segment.ordinal(), kRelaxed);
    // And who still looks at what was given up here finds another header (StreamReader::is_at) before any of its bytes, also of those that go
    // past the caches.
    if (std::exchange(given_up_, false)) {
        write_words(payload_ - sizeof(RecordHeader), header_of(info_, RecordState::Open, segment.header().nonce));
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    return {};
}

Status StreamWriter::begin(const RecordInfo& info, std::byte** payload) {
    if (auto status = place(info); !status) return status;
    const Segment& segment = *segments_.back();
    write_words(payload_ - sizeof(RecordHeader), header_of(info_, RecordState::Open, segment.header().nonce));
    index_->open_offset.store(segment.end(), kRelaxed);
    index_->published.store(0, kRelaxed);
    index_->open_seq.store(info_.seq, kRelease);
    *payload = payload_;
    FT_POINT("log.payload.before");
    return {};
}

Status StreamWriter::make_room(std::uint64_t length) {
    return segments_.empty() || !segments_.back()->fits(length) ? roll(length) : Status{};
}

void StreamWriter::publish(std::uint64_t bytes, std::optional<std::uint32_t> sum) {
    FT_CHECK(payload_ != nullptr && bytes <= info_.length, "%llu bytes of a log record are published, of %llu",
             static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(info_.length));
    if (bytes <= published_) return;
    info_.crc = sum ? *sum : crc32c(payload_ + published_, bytes - published_, info_.crc);
    published_ = bytes;
    index_->published.store(bytes, kRelease);
}

void StreamWriter::put(ByteView part, Into into) {
    FT_CHECK(payload_ != nullptr && part.size() <= info_.length - published_,
             "%zu bytes are put into a log record of %llu, after %llu", part.size(),
             static_cast<unsigned long long>(info_.length), static_cast<unsigned long long>(published_));
    if (part.data() == payload_ + published_) {
        publish(published_ + part.size());
        return;
    }
    while (!part.empty()) {
        const auto n = std::min<std::size_t>(kChunk, part.size());
        if (n < kChunk) {
            info_.crc = crc32c_copy(payload_ + published_, part.data(), n, info_.crc, into);
        } else {
            const auto sum = crc32c_copy(payload_ + published_, part.data(), n, 0, into);
            info_.crc = crc32c_join(info_.crc, sum, n);
            newest_part_ = {info_.seq, published_, n, sum};
        }
        index_->published.store(published_ += n, kRelease);
        part = part.subspan(n);
    }
}

Status StreamWriter::commit() {
    FT_CHECK(payload_ != nullptr, "a log record is committed that was not begun");
    publish(info_.length);
    if (FT_POINT("log.payload.after").action == fault::Action::Corrupt && info_.length > 0)
        payload_[info_.length / 2] ^= std::byte{1};
    FT_POINT("log.header.before");
    Segment& segment = *segments_.back();
    write_words(payload_ - sizeof(RecordHeader), header_of(info_, RecordState::Committed, segment.header().nonce));
    FT_POINT("log.header.after");
    payload_ = nullptr;
    {
        std::unique_lock lock(dir_.mutex_, std::defer_lock);
        if (dir_.host_durable()) lock.lock();  // flush looks at it, from any thread
        segment.added(info_.length);
        last_ = info_.seq;
    }
    // The next record is likely to be like this one. Its place was last used a checkpoint ago, and is far from the caches.
    const auto like_this = std::min<std::uint64_t>(sizeof(RecordHeader) + info_.length, kFetched);
    if (segment.end() + like_this <= segment.header().size)
        for (std::uint64_t at = 0; at < like_this; at += kAlign) __builtin_prefetch(segment.at(segment.end() + at), 1);
    FT_POINT("log.watermark.before");
    index_->sent.store(last_, kRelease);
    index_->open_seq.store(0, kRelease);  // who finds it closed finds it committed
    FT_POINT("log.watermark.after");
    return {};
}

void StreamWriter::abandon() {
    FT_CHECK(payload_ != nullptr, "a log record is abandoned that was not begun");
    payload_ = nullptr;
    given_up_ = true;
    index_->generation.fetch_add(1, kRelease);
    index_->open_seq.store(0, kRelease);
}

Status StreamWriter::append(const RecordInfo& info, ByteView payload) {
    RecordInfo whole = info;
    whole.length = payload.size();
    std::byte* to = nullptr;
    if (auto status = begin(whole, &to); !status) return status;
    put(payload);
    return commit();
}

Status StreamWriter::append_whole(const RecordInfo& info, std::span<const ByteView> parts) {
    if (auto status = place(info); !status) return status;
    FT_POINT("log.payload.before");
    for (const auto& part : parts) {
        FT_CHECK(part.size() <= info_.length - published_, "a log record of %llu bytes has longer parts",
                 static_cast<unsigned long long>(info_.length));
        info_.crc = crc32c_copy(payload_ + published_, part.data(), part.size(), info_.crc, Into::Caches);
        published_ += part.size();
    }
    return commit();
}

Status StreamWriter::find_segment(std::uint64_t seq, Segment** out) {
    if (seq <= collected_ || seq > last_)
        return Status::error(Code::Invalid, "the log " + text_of(key_) + " has records " + std::to_string(first_seq()) + " to " +
                                                std::to_string(last_) + ", not " + std::to_string(seq));
    auto it = std::upper_bound(segments_.begin(), segments_.end(), seq,
                               [](std::uint64_t s, const auto& segment) { return s < segment->first_seq(); });
    FT_CHECK(it != segments_.begin(), "record %llu of a log is before its first segment", static_cast<unsigned long long>(seq));
    Segment& segment = **--it;
    if (segment.file() == nullptr)
        if (auto status = map_spilled(*it); !status) return status;
    if (!segment.scan(seq)) return damaged(key_, segment.next_seq(), "its header does not match its checksum");
    *out = &segment;
    return {};
}

Status StreamWriter::find(std::uint64_t seq, RecordInfo* info, ByteView* payload, bool verify) {
    Segment* segment = nullptr;
    if (auto status = find_segment(seq, &segment); !status) return status;
    return segment->read(key_, seq, verify, info, payload);
}

Held StreamWriter::hold(std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) {
    Held held;
    if (payload_ != nullptr && seq == info_.seq) {
        if (at + bytes > published_) return {};
        held = {{payload_ + at, bytes}, segments_.back()->file()};
    } else {
        Segment* segment = nullptr;
        RecordInfo info;
        ByteView payload;
        if (!find_segment(seq, &segment) || !segment->read(key_, seq, false, &info, &payload) || at + bytes > payload.size())
            return {};
        held = {payload.subspan(at, bytes), segment->file()};
    }
    if (newest_part_.seq == seq && newest_part_.at == at && newest_part_.bytes == bytes) held.sum = newest_part_.sum;
    return held;
}

// Each new segment is as large as all before it: there are few of them, and at most about half of what the stream has lies idle. 0: such a
// record would leave much of it empty.
std::uint64_t StreamWriter::grown_for(std::uint64_t length) const {
    std::uint64_t held = 0;
    for (const auto& segment : segments_)
        if (!segment->spilled) held += segment->file_size;
    const auto grown = std::bit_floor(std::min(held, dir_.config_.grown_bytes));
    return grown > dir_.config_.segment_bytes && length <= grown / 2 - kPage ? grown : 0;
}

// A new segment for a record of that length. Only when it is there does anything change.
Status StreamWriter::roll(std::uint64_t length) {
    std::lock_guard lock(dir_.mutex_);
    if (wanted_ > collected_)
        if (auto status = collect_now(); !status) return status;
    if (length > kLongest || length > dir_.config_.limit)
        return dir_.full(length, "a record can't be larger").within("the log " + text_of(key_));
    FreeSegment free;
    const auto grown = grown_for(length), bytes = segment_size_for(length, dir_.config_.segment_bytes);
    if (grown == 0 || !dir_.take_if_there_is_room(grown, &free))
        if (auto status = dir_.take(bytes, key_.dst >= dir_.config().world_size, &free); !status)
            return std::move(status).within("the log " + text_of(key_));
    SegmentHeader header{.comm = key_.comm,
                         .src = key_.src,
                         .dst = key_.dst,
                         .ordinal = next_ordinal_,
                         .first_seq = last_ + 1,
                         .size = free.file->size,
                         .nonce = os_random64(),
                         .boot = dir_.boot()};
    header.crc = crc_of(header);
    std::memcpy(free.file->base, &header, sizeof header);
    FT_POINT("log.roll.before");
    // In place before it has its name, also after a crash of the host.
    const bool refused = dir_.host_durable() && ::msync(free.file->base, kPage, MS_SYNC) != 0;
    const std::string name = segment_name(header.ordinal);
    if (refused || ::renameat(dir_.pool_.folder(), free.name.c_str(), folder_.get(), name.c_str()) != 0) {
        auto status = system_error("beginning segment " + name + " of the log " + text_of(key_));
        dir_.give_back(std::move(free));
        return status;
    }
    segments_.push_back(std::make_shared<Segment>(std::move(free.file), header));
    segments_.back()->age = ++dir_.ages_;
    ++next_ordinal_;
    FT_POINT("log.roll.after");
    return {};
}

Status StreamWriter::collect(std::uint64_t through) {
    std::lock_guard lock(dir_.mutex_);
    wanted_ = std::max(wanted_, std::min(through, last_));
    auto status = collect_now();
    dir_.trim();
    return status;
}

Status StreamWriter::collect_now() {
    std::uint64_t through = wanted_;
    // A consumer still looks at what it has not acknowledged.
    if (index_->consumer.load(std::memory_order_acquire) != 0)
        through = std::min(through, index_->acknowledged.load(std::memory_order_acquire));
    if (through <= collected_) return {};
    FT_POINT("log.collect.before");
    collected_ = through;
    // Before the memory is written again: a reader that copies something looks at it afterwards.
    index_->collected.store(through, kRelease);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // The disk must not have forgotten this when the segments are gone.
    if (dir_.host_durable())
        if (auto status = index_.sync(); !status) return status;
    while (segments_.size() > 1 && segments_[1]->first_seq() <= through + 1)
        if (auto status = release_front(); !status) return status;
    // The last segment too, when all in it is given up: but for its header it is as good as new.
    if (segments_.size() == 1 && last_ == through && payload_ == nullptr && segments_[0]->next_seq() == last_ + 1 &&
        segments_[0]->end() > kFirstRecord)
        if (auto status = release_front(); !status) return status;
    FT_POINT("log.collect.after");
    return {};
}

Status StreamWriter::skip(std::uint64_t through) {
    FT_CHECK(payload_ == nullptr && last_ == collected_ && through >= last_, "a log with %llu records is to begin at %llu",
             static_cast<unsigned long long>(last_), static_cast<unsigned long long>(through + 1));
    std::lock_guard lock(dir_.mutex_);
    // One that was begun for a record that never was says where it begins.
    while (!segments_.empty())
        if (auto status = release_front(); !status) return status;
    // In this order: a process that dies between the two leaves an end that is not before the last record.
    index_->collected.store(through, kRelease);
    index_->sent.store(through, kRelease);
    last_ = collected_ = wanted_ = through;
    return dir_.host_durable() ? index_.sync() : Status{};
}

Status StreamWriter::release_front() {
    Segment& segment = *segments_.front();
    if (segment.spilled) {
        drop_spilled(segment.ordinal());
        dir_.spilled_ -= segment.file_size;
    } else {
        FreeSegment free{dir_.pool_.new_name(), segment.file()};
        const std::string name = segment_name(segment.ordinal());
        if (::renameat(folder_.get(), name.c_str(), dir_.pool_.folder(), free.name.c_str()) != 0)
            return system_error("recycling segment " + name + " of the log " + text_of(key_));
        dir_.give_back(std::move(free));
    }
    segments_.pop_front();
    return {};
}

std::uint64_t StreamWriter::synced() const { return index_->synced.load(std::memory_order_acquire); }

}  // namespace ftcomm::pairlog
