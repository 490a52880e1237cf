// Group commit: what is committed now is on stable storage afterwards. Beside the thread that writes.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "pairlog/writer.h"

namespace ftcomm::pairlog {

Status StreamWriter::flush() {
    if (!dir_.host_durable()) return {};
    std::lock_guard one(flushing_);
    struct Piece {
        std::shared_ptr<Mapping> file;   // stays mapped, whatever becomes of the segment
        std::uint64_t bytes;
    };
    std::vector<Piece> pieces;
    std::uint64_t through = 0, ordinal = 0;
    {
        std::lock_guard lock(dir_.mutex_);
        through = last_;
        for (const auto& segment : segments_) {
            ordinal = segment->ordinal();
            // A spilled one was synced when it was.
            if (!segment->spilled && ordinal >= synced_ordinal_) pieces.push_back({segment->file(), segment->end()});
        }
    }
    if (through <= synced()) return {};
    dir_.syncs_.fetch_add(1, std::memory_order_relaxed);
    for (const auto& piece : pieces)
        if (::msync(piece.file->base, std::min(aligned(piece.bytes, kPage), piece.file->size), MS_SYNC) != 0)
            return system_error("syncing the log " + text_of(key_));
    if (ordinal > synced_ordinal_) {
        if (::fsync(folder_.get()) != 0 || ::fsync(dir_.folder()) != 0)
            return system_error("syncing the folder of the log " + text_of(key_));
        synced_ordinal_ = ordinal;
    }
    index_->synced.store(through, std::memory_order_release);
    return index_.sync();
}

}  // namespace ftcomm::pairlog
