// Whole segments move to a folder on disk when memory is short.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/failpoint.h"
#include "pairlog/writer.h"

namespace ftcomm::pairlog {

// The oldest segment in memory, if it is full (or, !full, if it is the one written to, and nobody is writing).
Segment* StreamWriter::coldest(bool full) const {
    for (const auto& segment : segments_) {
        if (segment->spilled) continue;
        if ((segment == segments_.back()) == full) return nullptr;
        return full || (payload_ == nullptr && segment->end() > kFirstRecord) ? segment.get() : nullptr;
    }
    return nullptr;
}

Status StreamWriter::spill(Segment* segment) {
    // One that was not written by this process has not been looked at yet, and may have gaps in what it knows.
    segment->scan(last_);
    const auto bytes = std::min(aligned(segment->end(), kPage), segment->header().size);
    const std::string name = segment_name(segment->ordinal()), partial = name + ".new";
    const auto& config = dir_.config_;
    if (config.spill_limit > 0 && dir_.spilled_ + bytes > config.spill_limit)
        return Status::error(Code::LogFull, "the spill folder has reached its limit of " + size_text(config.spill_limit));
    FT_POINT("log.spill.before");
    Fd fd(::openat(spill_folder_.get(), partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!fd) return system_error("making " + config.spill_path + "/" + name_of(key_) + "/" + partial);
    auto status = write_all(fd.get(), segment->file()->base, bytes);
    if (status && dir_.host_durable() && ::fdatasync(fd.get()) != 0) status = system_error("syncing");
    if (status && ::renameat(spill_folder_.get(), partial.c_str(), spill_folder_.get(), name.c_str()) != 0)
        status = system_error("naming");
    if (status && dir_.host_durable() && ::fsync(spill_folder_.get()) != 0) status = system_error("syncing");
    if (!status) {
        ::unlinkat(spill_folder_.get(), partial.c_str(), 0);
        return std::move(status).within("spilling a segment to " + config.spill_path);
    }
    // From here on readers let go of the one in memory.
    index_->spilled.store(segment->ordinal(), std::memory_order_release);
    FT_POINT("log.spill.after");
    ::unlinkat(folder_.get(), name.c_str(), 0);
    dir_.resident_ -= segment->file_size;
    dir_.spilled_ += bytes;
    segment->spilled = true;
    segment->file_size = bytes;
    segment->move_to(nullptr);
    return {};
}

Status StreamWriter::map_spilled(const std::shared_ptr<Segment>& segment) {
    const std::string name = segment_name(segment->ordinal());
    const std::string shown = dir_.config_.spill_path + "/" + name_of(key_) + "/" + name;
    Fd fd(::openat(spill_folder_.get(), name.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) return errno == ENOENT ? damaged(key_, 0, shown + " is missing") : system_error("opening " + shown);
    std::shared_ptr<Mapping> file;
    SegmentHeader header;
    auto status = map_file(fd.get(), Access::Read, shown, &file);
    if (status) status = Segment::check(*file, key_, segment->ordinal(), true, &header);
    if (status && file->size < segment->file_size) status = damaged(key_, 0, shown + " is truncated to " + size_text(file->size));
    if (!status) return status;
    segment->move_to(std::move(file));
    dir_.mapped_spilled().add(segment);
    return {};
}

void StreamWriter::drop_spilled(std::uint64_t ordinal) { ::unlinkat(spill_folder_.get(), segment_name(ordinal).c_str(), 0); }

}  // namespace ftcomm::pairlog
