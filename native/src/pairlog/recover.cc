// What a new writer finds: which records are whole, and where it goes on.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "pairlog/writer.h"

namespace ftcomm::pairlog {

Status StreamWriter::open(LogDir& dir, const StreamKey& key, std::unique_ptr<StreamWriter>* out) {
    std::unique_ptr<StreamWriter> writer(new StreamWriter(dir, key));
    std::unique_lock lock(dir.mutex_);
    auto status = open_folder(dir.folder(), name_of(key), true, &writer->folder_);
    if (!status) return std::move(status).within("the log " + text_of(key));
    if (int holder = 0; !writer->lock_.take(writer->folder_.get(), "writer", &holder))
        return Status::error(Code::System, "the log " + text_of(key) + " is being written by process " + std::to_string(holder) +
                                               ", which is alive: end it before its replacement starts");
    if (dir.spill_folder() >= 0) status = open_folder(dir.spill_folder(), name_of(key), true, &writer->spill_folder_);
    for (bool again = status.ok(); again;) {
        status = writer->index_.create(writer->folder_.get(), key);
        again = status.code == Code::LogFull && dir.drop_free_of_any();
    }
    if (status) status = writer->recover();
    if (status) dir.writers_.push_back(writer.get());
    lock.unlock();
    if (!status) return status.code == Code::LogFull ? dir.no_room(status.message) : status;
    *out = std::move(writer);
    return {};
}

Status StreamWriter::exists(const LogDir& dir, const StreamKey& key, bool* there) {
    *there = ::faccessat(dir.folder(), name_of(key).c_str(), F_OK, 0) == 0;
    return *there || errno == ENOENT ? Status{} : system_error("looking for the log " + text_of(key));
}

Status StreamWriter::recover() {
    collected_ = wanted_ = index_->collected.load();
    if (auto status = load(); !status) return status;
    // What another boot of the host left was written back in any order: only what was synced counts.
    const bool same_boot = is_same_boot();
    if (auto status = same_boot ? find_end() : find_synced_end(); !status) return status;
    // A collect that was cut off.
    while (segments_.size() > 1 && segments_[1]->first_seq() <= collected_ + 1)
        if (auto status = release_front(); !status) return status;
    // A reader that has copied a part of the open record learns of its end before it can see anything new there.
    index_->generation.fetch_add(1);
    index_->open_seq.store(0);
    index_->published.store(0);
    index_->sent.store(last_);
    if (!same_boot) index_->synced.store(last_);
    index_->boot.store(dir_.boot());
    return dir_.host_durable() ? index_.sync() : Status{};
}

bool StreamWriter::is_same_boot() const { return index_->boot.load() == dir_.boot() || index_->boot.load() == 0; }

Status StreamWriter::load() {
    std::map<std::uint64_t, bool> found;   // ordinal, whether it is spilled
    std::vector<std::string> names;
    std::uint64_t ordinal = 0;
    if (auto status = list_folder(folder_.get(), &names); !status) return std::move(status).within("the log " + text_of(key_));
    for (const auto& name : names)
        if (parse_segment_name(name, &ordinal)) found[ordinal] = false;
    names.clear();
    if (spill_folder_)
        if (auto status = list_folder(spill_folder_.get(), &names); !status)
            return std::move(status).within("the log " + text_of(key_));
    for (const auto& name : names) {
        if (parse_segment_name(name, &ordinal)) {
            // The spilled one is whole; its writer died before it could remove the other.
            if (found.contains(ordinal)) ::unlinkat(folder_.get(), name.c_str(), 0);
            found[ordinal] = true;
            if (ordinal > index_->spilled.load()) index_->spilled.store(ordinal);
        } else if (name.ends_with(".new")) {
            ::unlinkat(spill_folder_.get(), name.c_str(), 0);
        }
    }
    if (found.empty()) next_ordinal_ = index_->open_ordinal.load() + 1;  // readers know the earlier ones by their ordinals
    for (const auto& [number, spilled] : found) {
        if (!segments_.empty() && number != segments_.back()->ordinal() + 1)
            return damaged(key_, segments_.back()->next_seq(),
                           "segment " + std::to_string(segments_.back()->ordinal() + 1) + " is missing");
        auto status = load_one(number, spilled);
        // find_synced_end says whether that matters. The oldest may be collected, and begun by another stream: that it has lost
        // its name here need not have come to the disk.
        if (status.code == Code::LogCorrupt && !is_same_boot()) {
            if (segments_.empty()) continue;
            break;
        }
        if (!status) return status;
        next_ordinal_ = number + 1;
    }
    if (is_same_boot() && !segments_.empty() && segments_.front()->first_seq() > collected_ + 1)
        return damaged(
            key_, collected_ + 1,
            "it was not collected, but the oldest segment begins with record " + std::to_string(segments_.front()->first_seq()));
    return {};
}

Status StreamWriter::load_one(std::uint64_t ordinal, bool spilled) {
    const std::string name = segment_name(ordinal), shown = "segment " + std::to_string(ordinal) + " of the log " + text_of(key_);
    Fd fd(::openat(spilled ? spill_folder_.get() : folder_.get(), name.c_str(), (spilled ? O_RDONLY : O_RDWR) | O_CLOEXEC));
    if (!fd) return system_error("opening " + shown);
    struct stat info{};
    if (::fstat(fd.get(), &info) != 0) return system_error("looking at " + shown);
    const auto size = static_cast<std::uint64_t>(info.st_size);
    SegmentHeader header;
    if (spilled) {  // mapped when somebody looks into it
        if (::pread(fd.get(), &header, sizeof header, 0) < 0) return system_error("reading " + shown);
        if (auto status = Segment::check(header, size, key_, ordinal, true); !status) return status;
        segments_.push_back(std::make_shared<Segment>(size, header));
    } else {
        std::shared_ptr<Mapping> file;
        auto status = map_file(fd.get(), Access::Write, shown, &file);
        if (status) status = Segment::check(*file, key_, ordinal, false, &header);
        // All blocks were taken before it got its name: a hole now would be a SIGBUS when the file system is full.
        if (status && static_cast<std::uint64_t>(info.st_blocks) * 512 < size) status = reserve(fd.get(), size, shown);
        if (!status) return status;
        segments_.push_back(std::make_shared<Segment>(std::move(file), header));
    }
    segments_.back()->age = ++dir_.ages_;
    (spilled ? dir_.spilled_ : dir_.resident_) += segments_.back()->file_size;
    return {};
}

// After the death of the writer alone: memory is as it left it, so only what it had not finished may be missing.
Status StreamWriter::find_end() {
    const auto sent = index_->sent.load();
    last_ = collected_;
    if (!segments_.empty()) {
        Segment& newest = *segments_.back();
        if (newest.file() == nullptr)
            if (auto status = map_spilled(segments_.back()); !status) return status;
        newest.scan(~std::uint64_t{0});
        // A record whose header came and whose watermark did not: nobody has seen it, and it counts if it is whole.
        RecordInfo info;
        ByteView payload;
        for (; newest.next_seq() > sent + 1 && newest.next_seq() > newest.first_seq(); newest.drop_last())
            if (newest.read(key_, newest.next_seq() - 1, true, &info, &payload)) break;
        last_ = std::max(last_, newest.next_seq() - 1);
    }
    if (last_ < sent) {
        const std::string what = segments_.empty() ? "its segment is missing" : "its header does not match its checksum";
        return damaged(key_, last_ + 1, what + ", and records up to " + std::to_string(sent) + " were committed");
    }
    return {};
}

// After the death of the host.
Status StreamWriter::find_synced_end() {
    const auto synced = std::max(index_->synced.load(), collected_);
    last_ = collected_;
    std::size_t kept = 0;
    RecordInfo info;
    ByteView payload;
    for (; kept < segments_.size() && last_ < synced; ++kept) {
        Segment& segment = *segments_[kept];
        if (segment.first_seq() > last_ + 1) break;
        if (segment.file() == nullptr)
            if (auto status = map_spilled(segments_[kept]); !status) return status;
        segment.scan(synced);
        for (auto seq = std::max(segment.first_seq(), collected_ + 1); seq < segment.next_seq(); ++seq) {
            if (auto status = segment.read(key_, seq, true, &info, &payload); !status) return status;
            last_ = seq;
        }
    }
    if (last_ < synced)
        return damaged(key_, last_ + 1, "it is missing, and records up to " + std::to_string(synced) + " were synced");
    if (auto status = drop_all_but(kept); !status) return status;
    if (kept > 0) next_ordinal_ = segments_.back()->ordinal() + 1;
    // An old record beyond the end must not be taken for one that follows a new one.
    if (kept > 0 && !segments_.back()->spilled) {
        Segment& newest = *segments_.back();
        std::memset(newest.at(newest.end()), 0, newest.header().size - newest.end());
    }
    return {};
}

// But the first ones of segments_.
Status StreamWriter::drop_all_but(std::size_t count) {
    while (segments_.size() > count) {
        (segments_.back()->spilled ? dir_.spilled_ : dir_.resident_) -= segments_.back()->file_size;
        segments_.pop_back();
    }
    const auto first = segments_.empty() ? 1 : segments_.front()->ordinal(),
               last = segments_.empty() ? 0 : segments_.back()->ordinal();
    std::vector<std::string> names;
    std::uint64_t ordinal = 0;
    for (const int folder : {folder_.get(), spill_folder_.get()}) {
        if (folder < 0) continue;
        if (auto status = list_folder(folder, &names); !status) return std::move(status).within("the log " + text_of(key_));
        for (const auto& name : names)
            if (parse_segment_name(name, &ordinal) && (ordinal < first || ordinal > last)) ::unlinkat(folder, name.c_str(), 0);
    }
    return {};
}

}  // namespace ftcomm::pairlog
