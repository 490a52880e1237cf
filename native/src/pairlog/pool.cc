#include "pairlog/pool.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "base/random.h"

namespace ftcomm::pairlog {
namespace {

constexpr const char* kLock = "lock";
constexpr const char* kPrefix = "free-";

// Something of what was in it is still on its way.
bool is_held(const FreeSegment& segment) { return segment.file.use_count() > 1; }

// Readers may still map it: without the hole its memory would be theirs for as long as they do.
void drop(int folder, const std::string& name, std::uint64_t size) {
    Fd fd(::openat(folder, name.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
    if (fd) (void)::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size));
    ::unlinkat(folder, name.c_str(), 0);
}

}  // namespace

Status Pool::open(int log, const std::string& path, int owner, std::uint64_t limit) {
    log_ = log;
    const std::string own = kPrefix + std::to_string(owner) + "-";
    int holder = 0;
    for (int attempt = 0;; ++attempt) {
        char name[64];
        std::snprintf(name, sizeof name, "%d-%016" PRIx64, static_cast<int>(::getpid()), os_random64());
        name_ = own + name;
        path_ = path + "/" + name_;
        if (auto status = open_folder(log, name_, true, &folder_); !status) return status;
        lock_ = std::make_unique<FileLock>();
        if (lock_->take(folder_.get(), kLock, &holder)) break;
        // Somebody who looks for the pools of the dead came between the making of the lock file and the lock.
        if (attempt == 8) return system_error("locking " + path_);
    }
    adopt(own, limit);
    return {};
}

Pool::~Pool() {
    if (!folder_) return;
    while (drop_one() > 0) {}
    ::unlinkat(folder_.get(), kLock, 0);
    lock_.reset();
    ::unlinkat(log_, name_.c_str(), AT_REMOVEDIR);
}

bool Pool::drop_of_the_dead() { return adopt(kPrefix, 0) > 0; }

// Takes what there is room for, and drops the rest. How many there were.
std::size_t Pool::adopt(const std::string& whose, std::uint64_t limit) {
    std::size_t found = 0;
    for (const auto& other : list_folder(log_)) {
        if (!other.starts_with(whose) || other == name_) continue;
        Fd folder;
        if (!open_folder(log_, other, false, &folder)) continue;
        FileLock lock;
        struct stat info{};
        int holder = 0;
        // Without its lock file it is just being made or removed by its owner.
        if (::fstatat(folder.get(), kLock, &info, 0) != 0 || !lock.take(folder.get(), kLock, &holder)) continue;
        for (const auto& name : list_folder(folder.get())) {
            if (name == kLock || ::fstatat(folder.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
            ++found;
            const auto size = static_cast<std::uint64_t>(info.st_size);
            FreeSegment segment{new_name(), nullptr};
            // A file whose maker was killed before all blocks were there would be a SIGBUS to come.
            const bool whole = S_ISREG(info.st_mode) && size > 0 && static_cast<std::uint64_t>(info.st_blocks) * 512 >= size;
            if (whole && bytes_ + size <= limit &&
                ::renameat(folder.get(), name.c_str(), folder_.get(), segment.name.c_str()) == 0) {
                Fd fd(::openat(folder_.get(), segment.name.c_str(), O_RDWR | O_CLOEXEC));
                if (fd && map_file(fd.get(), Access::Write, segment.name, &segment.file)) put(std::move(segment));
            } else {
                drop(folder.get(), name, size);
            }
        }
        ::unlinkat(folder.get(), kLock, 0);
        ::unlinkat(log_, other.c_str(), AT_REMOVEDIR);
    }
    return found;
}

bool Pool::take(std::uint64_t bytes, FreeSegment* out) {
    const auto none = free_.size();
    auto best = none;  // the smallest, and of those the one used last
    for (std::size_t i = none; i-- > 0;) {
        const auto size = free_[i].file->size;
        if (is_held(free_[i])) continue;
        if (size >= bytes && size <= 2 * bytes && (best == none || size < free_[best].file->size)) best = i;
    }
    if (best == none) return false;
    *out = std::move(free_[best]);
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
    bytes_ -= out->file->size;
    return true;
}

Status Pool::make(std::uint64_t bytes, FreeSegment* out) {
    const std::string name = new_name(), shown = path_ + "/" + name;
    Fd fd(::openat(folder_.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!fd) {
        auto status = system_error("making " + shown);
        if (errno == ENOSPC || errno == EDQUOT) status.code = Code::LogFull;
        return status;
    }
    auto status = reserve(fd.get(), bytes, shown, &huge_);
    if (status) status = map_file(fd.get(), Access::Write, shown, &out->file);
    if (!status) {
        ::unlinkat(folder_.get(), name.c_str(), 0);
        return status;
    }
    fault_in(*out->file, Access::Write);
    out->name = name;
    return {};
}

void Pool::put(FreeSegment segment) {
    bytes_ += segment.file->size;
    free_.push_back(std::move(segment));
}

std::uint64_t Pool::drop_one() {
    if (free_.empty()) return 0;
    auto oldest = std::find_if_not(free_.begin(), free_.end(), is_held);
    if (oldest == free_.end()) oldest = free_.begin();
    const FreeSegment segment = std::move(*oldest);
    free_.erase(oldest);
    const std::uint64_t size = segment.file->size;
    bytes_ -= size;
    if (is_held(segment)) {  // the hole comes when that is over
        segment.file->dropped = true;
        ::unlinkat(folder_.get(), segment.name.c_str(), 0);
    } else {
        drop(folder_.get(), segment.name, size);
    }
    return size;
}

std::string Pool::new_name() { return "s" + std::to_string(++made_); }

}  // namespace ftcomm::pairlog
