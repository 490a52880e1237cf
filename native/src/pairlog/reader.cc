#include "pairlog/reader.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>

#include "base/check.h"
#include "base/failpoint.h"

namespace ftcomm::pairlog {
namespace {

constexpr auto kAcquire = std::memory_order_acquire;
constexpr int kAttempts = 100;   // each one a collect that came between

}  // namespace

Status StreamReader::open(LogDir& dir, const StreamKey& key, Role role, std::unique_ptr<StreamReader>* out) {
    std::unique_ptr<StreamReader> reader(new StreamReader(dir, key, role));
    reader->refresh();
    if (!reader->error_) return reader->error_;
    *out = std::move(reader);
    return {};
}

bool StreamReader::attach() {
    error_ = {};
    const std::string name = name_of(key_);
    struct stat info{};
    if (::fstatat(dir_.folder(), name.c_str(), &info, 0) != 0 && errno == ENOENT) return false;
    bool absent = false;
    error_ = open_folder(dir_.folder(), name, false, &folder_);
    if (error_) error_ = index_.open(folder_.get(), key_, &absent);
    if (absent) error_ = {};
    if (!error_ || absent) return false;
    if (role_ == Role::Consumer) index_->consumer.store(1, std::memory_order_release);
    return true;
}

bool StreamReader::refresh() {
    if (!index_ && !attach()) return false;
    const auto before = last_, before_collected = collected_, before_spilled = spilled_;
    last_ = index_->sent.load(kAcquire);
    collected_ = index_->collected.load(kAcquire);
    spilled_ = index_->spilled.load(kAcquire);
    if (collected_ != before_collected || spilled_ != before_spilled || opened_) let_go();
    opened_ = false;
    const auto open = index_->open_seq.load(kAcquire), published = index_->published.load(kAcquire);
    const auto generation = index_->generation.load(kAcquire);
    const bool moved = open != 0 && (open != seen_open_ || published != seen_published_ || generation != seen_generation_);
    seen_open_ = open;
    seen_published_ = published;
    seen_generation_ = generation;
    return last_ != before || moved;
}

void StreamReader::let_go() {
    // The file in memory is unlinked; what keeps its memory is this mapping.
    std::erase_if(segments_, [&](const auto& one) { return one.first <= spilled_ && !one.second->spilled; });
    while (!segments_.empty()) {
        auto& [ordinal, segment] = *segments_.begin();
        const auto next = std::next(segments_.begin());
        if (next != segments_.end() ? next->second->first_seq() > collected_ + 1 : segment->next_seq() > collected_ + 1) break;
        if (next == segments_.end() && segment->next_seq() == segment->first_seq()) break;  // not looked at yet
        if (!segment->spilled) dir_.idle().put(segment->file());
        segments_.erase(segments_.begin());
    }
}

Status StreamReader::find(std::uint64_t seq, RecordInfo* info, ByteView* payload, bool verify) {
    if (!error_) return error_;
    const auto gone = [&] {
        return Status::error(Code::Invalid, "the log " + text_of(key_) + " has records " + std::to_string(first_seq()) + " to " +
                                                std::to_string(last_) + ", not " + std::to_string(seq));
    };
    if (seq <= collected_ || seq > last_) return gone();
    Segment* segment = nullptr;
    auto status = find_segment(seq, &segment);
    if (status) status = segment->read(key_, seq, verify, info, payload);
    if (status || intact(seq)) return status;
    collected_ = index_->collected.load(kAcquire);  // recycled under our eyes: no damage
    opened_ = true;
    return gone();
}

Status StreamReader::find_segment(std::uint64_t seq, Segment** out) {
    for (int attempt = 0;; ++attempt) {
        auto it = segments_.end();
        while (it != segments_.begin() && std::prev(it)->second->first_seq() > seq) --it;
        if (it == segments_.begin()) {
            if (auto status = open_oldest(); !status) return status;
            it = std::next(segments_.begin());
        }
        Segment* segment = std::prev(it)->second.get();
        if (segment->file() == nullptr) {
            const auto ordinal = segment->ordinal();
            Status status;
            segment = known(ordinal, &status);
            if (!status) return status;
            if (segment == nullptr) {  // collected since: look again from what is left
                segments_.erase(segments_.begin(), segments_.upper_bound(ordinal));
                continue;
            }
        }
        if (segment->first_seq() > seq) return damaged(key_, seq, "its segment is missing");
        for (;; segment = *out) {
            *out = segment;
            if (segment->scan(seq)) return {};
            // It is in a later one, or it is damaged.
            Status status;
            Segment* next = known(segment->ordinal() + 1, &status);
            if (!status) return status;
            if (next == nullptr || next->first_seq() > seq) break;
            *out = next;
        }
        // Where we have let go of some that were spilled, the next one may have been collected since: look again from there.
        std::atomic_thread_fence(kAcquire);  // after what scan() has read
        const auto collected = index_->collected.load(kAcquire);
        if (segment->next_seq() > collected || attempt == kAttempts)
            return damaged(key_, segment->next_seq(), "its header does not match its checksum");
        segments_.erase(segments_.begin(), segments_.upper_bound(segment->ordinal()));
    }
}

Status StreamReader::open_spill_folder() {
    const std::string name = name_of(key_);
    struct stat info{};
    if (spill_folder_ || dir_.spill_folder() < 0) return {};
    if (::fstatat(dir_.spill_folder(), name.c_str(), &info, 0) != 0 && errno == ENOENT) return {};
    return open_folder(dir_.spill_folder(), name, false, &spill_folder_);
}

Status StreamReader::open_oldest() {
    std::vector<std::uint64_t> ordinals;
    std::vector<std::string> names;
    std::uint64_t ordinal = 0;
    if (auto status = open_spill_folder(); !status) return status;
    for (const int folder : {folder_.get(), spill_folder_.get()}) {
        if (folder < 0) continue;
        if (auto status = list_folder(folder, &names); !status) return std::move(status).within("the log " + text_of(key_));
        for (const auto& name : names)
            if (parse_segment_name(name, &ordinal)) ordinals.push_back(ordinal);
    }
    std::sort(ordinals.begin(), ordinals.end());
    for (const auto number : ordinals) {  // those at the front may go while we look
        Status status;
        if (known(number, &status) != nullptr || !status) return status;
    }
    return damaged(key_, collected_ + 1, "its segment is missing");
}

Segment* StreamReader::known(std::uint64_t ordinal, Status* status) {
    const auto it = segments_.find(ordinal);
    if (it != segments_.end() && it->second->file() != nullptr) return it->second.get();
    std::shared_ptr<Segment> segment;
    if (it != segments_.end()) {  // spilled, and not mapped any more
        *status = open_segment(ordinal, true, &segment);
        if (*status && segment != nullptr && segment->file_size < it->second->file_size)
            *status =
                damaged(key_, 0, "segment " + std::to_string(ordinal) + " is truncated to " + size_text(segment->file_size));
        if (!*status || segment == nullptr) return nullptr;
        it->second->move_to(segment->file());
        dir_.mapped_spilled().add(it->second);
        return it->second.get();
    }
    *status = open_segment(ordinal, false, &segment);
    if (*status && segment == nullptr && dir_.spill_folder() >= 0) *status = open_segment(ordinal, true, &segment);
    if (!*status || segment == nullptr) return nullptr;
    opened_ = true;
    if (segment->spilled) dir_.mapped_spilled().add(segment);
    return segments_.emplace(ordinal, std::move(segment)).first->second.get();
}

Status StreamReader::open_segment(std::uint64_t ordinal, bool spilled, std::shared_ptr<Segment>* out) {
    if (spilled)
        if (auto status = open_spill_folder(); !status || !spill_folder_) return status;
    const std::string shown = "segment " + std::to_string(ordinal) + " of the log " + text_of(key_);
    Fd fd(::openat(spilled ? spill_folder_.get() : folder_.get(), segment_name(ordinal).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) return errno == ENOENT ? Status{} : system_error("opening " + shown);
    struct stat info{};
    if (::fstat(fd.get(), &info) != 0) return system_error("looking at " + shown);
    auto file = dir_.idle().take(info.st_dev, info.st_ino);
    if (file == nullptr) {
        if (auto status = map_file(fd.get(), Access::Read, shown, &file); !status) return status;
        if (!spilled) fault_in(*file, Access::Read);
    }
    SegmentHeader header;
    if (auto status = Segment::check(*file, key_, ordinal, spilled, &header); !status) {
        // Its writer takes the name away before it writes another header: what was collected meanwhile is gone, and not damaged.
        struct stat named{};
        const int folder = spilled ? spill_folder_.get() : folder_.get();
        const bool gone = ::fstatat(folder, segment_name(ordinal).c_str(), &named, 0) != 0
                              ? errno == ENOENT
                              : named.st_dev != info.st_dev || named.st_ino != info.st_ino;
        return gone ? Status{} : status;
    }
    *out = std::make_shared<Segment>(std::move(file), header);
    (*out)->spilled = spilled;
    return {};
}

bool StreamReader::partial(RecordInfo* info, ByteView* so_far, std::uint64_t* generation) {
    if (!index_) return false;
    const auto before = index_->generation.load(kAcquire);
    const auto seq = index_->open_seq.load(kAcquire);
    if (seq == 0 || seq != last_ + 1) return false;
    const auto ordinal = index_->open_ordinal.load(kRelaxed), offset = index_->open_offset.load(kRelaxed);
    Status status;
    const Segment* segment = known(ordinal, &status);
    if (segment == nullptr || offset < kFirstRecord || offset + sizeof(RecordHeader) > segment->file()->size) return false;
    *info = info_of(read_words(segment->at(offset)));
    info->crc = 0;  // until it is committed
    const auto published = index_->published.load(kAcquire);
    // All of the above was of this one record only if nothing has moved on. Acquired: if it has, the next refresh() sees how far.
    std::atomic_thread_fence(kAcquire);
    if (index_->generation.load(kAcquire) != before || index_->open_seq.load(kAcquire) != seq ||
        index_->sent.load(kAcquire) != last_ || published > info->length ||
        info->length > segment->file()->size - offset - sizeof(RecordHeader))
        return false;
    *so_far = ByteView(segment->at(offset) + sizeof(RecordHeader), published);
    *generation = before;
    return true;
}

std::uint64_t StreamReader::generation() const {
    std::atomic_thread_fence(kAcquire);
    return index_ ? index_->generation.load(kAcquire) : 0;
}

bool StreamReader::is_at(const RecordInfo& info, ByteView so_far) const {
    const auto now = info_of(read_words(so_far.data() - sizeof(RecordHeader)));
    return now.seq == info.seq && now.kind == info.kind && now.tag == info.tag && now.aux == info.aux &&
           now.length == info.length;
}

bool StreamReader::intact(std::uint64_t seq) const {
    std::atomic_thread_fence(kAcquire);
    return index_ && index_->collected.load(kAcquire) < seq;
}

void StreamReader::acknowledge(std::uint64_t seq) {
    FT_CHECK(role_ == Role::Consumer && seq <= last_, "record %llu of a log is acknowledged by one who has not got it",
             static_cast<unsigned long long>(seq));
    if (!index_ || seq <= index_->acknowledged.load(kRelaxed)) return;
    FT_POINT("log.ack");
    index_->acknowledged.store(seq, std::memory_order_release);
}

std::uint64_t StreamReader::acknowledged() const { return index_ ? index_->acknowledged.load(kAcquire) : 0; }

}  // namespace ftcomm::pairlog
