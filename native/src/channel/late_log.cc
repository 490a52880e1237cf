#include "channel/late_log.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/failpoint.h"

namespace ftcomm {

namespace {

// What is late at most. Beyond it a record waits until older ones are written.
constexpr std::uint64_t kMostBytes = 64ull << 20;
constexpr std::size_t kMostRecords = 4096;
constexpr std::uint64_t kPart = 64u << 10;
constexpr std::uint64_t kAll = ~std::uint64_t{0};
constexpr std::uint64_t kGroup = 8ull << 20;  // so much is synced together, at most

}  // namespace

std::uint64_t LateLog::last(const LogKey& key) {
    if (order_.empty()) return log_->last(key);
    const auto it = late_.find(key);
    return log_->last(key) + (it == late_.end() ? 0 : it->second.size());
}

// Before what is not late: records of a stream keep their order.
Status LateLog::catch_up(const LogKey& key) {
    if (!order_.empty())
        if (const auto it = late_.find(key); it != late_.end() && !it->second.empty())
            if (auto s = flush(); !s) return s;
    log_->set_position(position_);
    return {};
}

Status LateLog::append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) {
    if (!order_.empty() || key.dst >= 0)  // what a rank notes for itself has no position
        if (auto s = catch_up(key); !s) return s;
    return log_->append(key, tag, aux, parts);
}

Status LateLog::append_made(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, const Make& make) {
    if (auto s = catch_up(key); !s) return s;
    return log_->append_made(key, tag, aux, bytes, make);
}

Status LateLog::append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                             const Shown& shown) {
    if (auto s = catch_up(key); !s) return s;
    return log_->append_shown(key, tag, aux, payload, stretch, shown);
}

Status LateLog::append_later(const LogKey& key, std::int64_t tag, std::uint64_t aux, Bytes& payload) {
    if (!on_) return Log::append_later(key, tag, aux, payload);
    if (auto s = make_room(payload.size()); !s) return s;
    Late late{tag, aux, std::move(payload), {}, position_};
    late.payload = late.owned;
    add(key, std::move(late));
    return {};
}

Status LateLog::append_held(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload,
                            std::function<void()> release) {
    if (!on_) return Log::append_held(key, tag, aux, payload, std::move(release));
    if (auto s = make_room(payload.size()); !s) return s;
    add(key, {tag, aux, {}, payload, position_, std::move(release)});
    return {};
}

Status LateLog::make_room(std::uint64_t bytes) {
    while (!order_.empty() && (bytes_ + bytes > kMostBytes || order_.size() >= kMostRecords))
        if (auto s = write_oldest(kAll); !s) return s;
    return {};
}

void LateLog::add(const LogKey& key, Late late) {
    bytes_ += late.payload.size();
    late.number = ++queued_;
    late_[key].push_back(std::move(late));
    order_.push_back(key);
    FT_POINT("late.queued");
}

const LateLog::Late* LateLog::late(const LogKey& key, std::uint64_t seq) {
    if (order_.empty()) return nullptr;
    const auto it = late_.find(key);
    if (it == late_.end() || it->second.empty()) return nullptr;
    const auto written = log_->last(key);
    if (seq <= written) return nullptr;
    FT_CHECK(seq - written <= it->second.size(), "record %llu of a stream with %llu and %zu late ones",
             static_cast<unsigned long long>(seq), static_cast<unsigned long long>(written), it->second.size());
    return &it->second[seq - written - 1];
}

Status LateLog::find(const LogKey& key, std::uint64_t seq, LogRecord* out) {
    const auto* record = late(key, seq);
    if (record == nullptr) return log_->find(key, seq, out);
    *out = {
        seq, record->tag, record->aux, crc32c(record->payload.data(), record->payload.size()), record->payload, record->position};
    return {};
}

// Its sum is computed when it is written.
Status LateLog::peek(const LogKey& key, std::uint64_t seq, LogRecord* out) {
    const auto* record = late(key, seq);
    if (record == nullptr) return log_->peek(key, seq, out);
    *out = {seq, record->tag, record->aux, std::nullopt, record->payload, record->position};
    return {};
}

Status LateLog::collect(const LogKey& key, std::uint64_t through) {
    failed_ = {};
    return log_->collect(key, through);
}

Status LateLog::write_oldest(std::uint64_t most) {
    const auto key = order_.front();
    const auto& record = late_[key].front();
    std::uint32_t crc = 0;
    const auto left = record.payload.size() - record.written;
    return write(key, record.payload.subspan(record.written, std::min<std::uint64_t>(most, left)), &crc);
}

Status LateLog::write(const LogKey& key, ByteView piece, std::uint32_t* crc) {
    auto& stream = late_[key];
    auto& record = stream.front();
    FT_POINT("late.write");
    log_->set_position(record.position);
    if (auto s = log_->append_piece(key, record.tag, record.aux, record.payload.size(), record.written, piece, crc); !s)
        return failed(std::move(s));
    record.written += piece.size();
    if (record.written < record.payload.size()) return {};
    if (auto s = log_->commit_pieces(key); !s) return failed(std::move(s));
    bytes_ -= record.payload.size();
    unsynced_bytes_ += record.payload.size();
    oldest_unsynced_ = std::min(oldest_unsynced_, record.number);
    recycle(std::move(record.owned));
    if (record.release) releases_.push_back(std::move(record.release));
    stream.pop_front();
    order_.erase(std::find(order_.begin(), order_.end(), key));
    return log_->is_durable() && unsynced_bytes_ < kGroup ? Status{} : sync();
}

// A send is done when its record is where it has to be.
Status LateLog::sync() {
    if (!is_unsynced()) return {};
    if (auto s = log_->flush(); !s) return failed(std::move(s));  // all of it is in the log, but not on the disk
    oldest_unsynced_ = kNone;
    unsynced_bytes_ = 0;
    for (const auto& release : std::exchange(releases_, {})) release();
    return {};
}

void LateLog::append_sent(const LogKey& key, std::uint64_t seq, std::uint64_t at, ByteView piece,
                          std::optional<std::uint32_t>* crc) {
    const auto* record = late(key, seq);
    if (record == nullptr || !failed_.ok() || record != &late_[key].front() || record->written < at ||
        record->written >= at + piece.size())
        return;
    const bool last = at + piece.size() == record->payload.size();
    std::uint32_t sum = 0;
    if (write(key, piece.subspan(record->written - at), &sum) && last) *crc = sum;
}

Held LateLog::hold(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) {
    const auto* record = late(key, seq);
    const bool there = record == nullptr || (record == &late_[key].front() && at + bytes <= record->written);
    return there ? log_->hold(key, seq, at, bytes) : Held{};
}

// What is written in part is written again from its beginning.
Status LateLog::failed(Status status) {
    for (auto& [key, stream] : late_)
        if (!stream.empty()) stream.front().written = 0;
    failed_ = status;
    release_all();  // their callers would wait for ever
    return status;
}

Status LateLog::flush() {
    failed_ = {};
    if (log_ != nullptr && order_.empty() && !is_unsynced()) return log_->flush();  // what did not pass through here
    while (!order_.empty())
        if (auto s = write_oldest(kAll); !s) return s;
    return sync();
}

void LateLog::release_all() {
    for (const auto& release : std::exchange(releases_, {})) release();
    for (auto& [key, stream] : late_)
        for (auto& record : stream) {
            if (!record.release) continue;
            record.owned = scratch(record.payload.size());
            record.owned.assign(record.payload.begin(), record.payload.end());
            record.payload = record.owned;
            std::exchange(record.release, nullptr)();
        }
}

void LateLog::work() {
    if (!has_work()) return;
    (void)(order_.empty() ? sync() : write_oldest(kPart));  // an error is said by the next append or flush that needs room
}

void LateLog::on_tick() { due_ = std::exchange(queued_at_tick_, queued_); }

// Memory that has been written to before: fresh pages cost more than the copy.
Bytes LateLog::scratch(std::uint64_t bytes) {
    const auto fits = std::find_if(spare_.begin(), spare_.end(), [&](const Bytes& b) { return b.capacity() >= bytes; });
    Bytes memory;
    if (fits != spare_.end()) {
        memory = std::move(*fits);
        spare_bytes_ -= memory.capacity();
        *fits = std::move(spare_.back());
        spare_.pop_back();
    }
    memory.clear();
    memory.reserve(bytes);
    return memory;
}

void LateLog::recycle(Bytes&& memory) {
    if (memory.capacity() == 0 || spare_bytes_ + memory.capacity() > kMostBytes || spare_.size() >= kMostRecords) return;
    spare_bytes_ += memory.capacity();
    spare_.push_back(std::move(memory));
}

}  // namespace ftcomm
