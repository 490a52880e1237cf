#include "pairlog/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/bytes.h"
#include "pairlog/layout.h"

namespace ftcomm::pairlog {

Fd::~Fd() {
    if (fd_ >= 0) ::close(fd_);
}

Status system_error(const std::string& what) { return Status::error(Code::System, what + ": " + std::strerror(errno)); }

std::string size_text(std::uint64_t bytes) {
    static const char* const kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    auto value = static_cast<double>(bytes);
    std::size_t unit = 0;
    for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
    char text[48];
    std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
    return text;
}

Status open_folder(int at, const std::string& path, bool make, Fd* out) {
    if (make && ::mkdirat(at, path.c_str(), 0700) != 0 && errno != EEXIST) return system_error("making the folder " + path);
    Fd fd(::openat(at, path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd) return system_error("opening the folder " + path);
    struct stat info{};
    if (::fstat(fd.get(), &info) != 0) return system_error("looking at the folder " + path);
    if (info.st_uid != ::geteuid())
        return Status::error(Code::LogCorrupt, "the folder " + path + " belongs to user " + std::to_string(info.st_uid) +
                                                   ", not to " + std::to_string(::geteuid()) +
                                                   " who runs this job: give the log another folder");
    if ((info.st_mode & 022) != 0)
        return Status::error(Code::LogCorrupt,
                             "others may write into the folder " + path + ": chmod 700 it, or give the log another");
    *out = std::move(fd);
    return {};
}

Status list_folder(int folder, std::vector<std::string>* out) {
    out->clear();
    // A descriptor of its own: readdir moves the offset.
    const int fd = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR* listing = fd >= 0 ? ::fdopendir(fd) : nullptr;
    if (listing == nullptr) {
        auto status = system_error("listing a folder of a log");
        if (fd >= 0) ::close(fd);
        return status;
    }
    Status status;
    for (;;) {
        errno = 0;
        const dirent* entry = ::readdir(listing);
        if (entry == nullptr) {
            if (errno != 0) status = system_error("listing a folder of a log");
            break;
        }
        const std::string name = entry->d_name;
        if (name != "." && name != "..") out->push_back(name);
    }
    ::closedir(listing);
    std::sort(out->begin(), out->end());
    return status;
}

std::vector<std::string> list_folder(int folder) {
    std::vector<std::string> names;
    if (!list_folder(folder, &names)) names.clear();
    return names;
}

Status write_all(int fd, const void* data, std::size_t size) {
    const auto* p = static_cast<const char*>(data);
    while (size > 0) {
        const ssize_t n = ::write(fd, p, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            auto status = system_error("writing");
            if (n < 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) status.code = Code::LogFull;
            return status;
        }
        p += n;
        size -= static_cast<std::size_t>(n);
    }
    return {};
}

bool read_file(int at, const std::string& name, std::string* out) {
    Fd fd(::openat(at, name.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) return false;
    out->clear();
    char buffer[4096];
    for (;;) {
        const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        if (n == 0) return true;
        out->append(buffer, static_cast<std::size_t>(n));
    }
}

namespace {

// A large one begins with a huge page, as those of a file can't be mapped as such otherwise.
void* map_shared(int fd, std::uint64_t size, int protection) {
    if (size < kHugePage) return ::mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
    void* room = ::mmap(nullptr, size + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return MAP_FAILED;
    const auto before = -reinterpret_cast<std::uintptr_t>(room) & (kHugePage - 1);
    auto* begin = static_cast<std::byte*>(room);
    void* p = ::mmap(begin + before, size, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    const int error = errno;
    if (before > 0) ::munmap(begin, before);
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const auto after = p == MAP_FAILED ? before : before + aligned(size, page);
    if (after < size + kHugePage) ::munmap(begin + after, size + kHugePage - after);
    errno = error;
    return p;
}

// Of a file that has no blocks yet. What is without them afterwards is left to who asked.
bool take_huge_pages(int fd, std::uint64_t bytes) {
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1
    const auto whole = bytes / kHugePage * kHugePage;
    if (whole == 0) return true;
    struct statfs system{};
    if (::fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC) return false;
    if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return false;
    // Of a huge page of which nothing is there none is made.
    for (std::uint64_t at = 0; at < whole; at += kHugePage)
        if (::fallocate(fd, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at), kPage) != 0) return false;
    void* p = map_shared(fd, whole, PROT_READ | PROT_WRITE);
    if (p == MAP_FAILED) return false;
    const bool taken = ::madvise(p, whole, kCollapse) == 0;
    ::munmap(p, whole);
    return taken;
}

}  // namespace

Status reserve(int fd, std::uint64_t bytes, const std::string& shown, bool* huge) {
    rlimit limit{};
    // Beyond RLIMIT_FSIZE the kernel would raise SIGXFSZ, so the limit is looked at first.
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < bytes)
        return Status::error(Code::LogFull, "the file size limit (ulimit -f) is below the " + size_text(bytes) + " of " + shown);
    if (huge != nullptr && *huge) *huge = take_huge_pages(fd, bytes);
    int error = 0;
    do error = ::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    while (error == EINTR);
    if (error == EOPNOTSUPP) error = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));  // glibc's: writes into each block
    if (error == 0) return {};
    errno = error;
    auto status = system_error("taking " + size_text(bytes) + " for " + shown);
    if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == ENOMEM) status.code = Code::LogFull;
    return status;
}

Mapping::~Mapping() {
    if (base == nullptr) return;
    if (dropped) (void)::madvise(base, size, MADV_REMOVE);
    ::munmap(base, size);
}

Status map_file(int fd, Access access, const std::string& shown, std::shared_ptr<Mapping>* out) {
    struct stat info{};
    if (::fstat(fd, &info) != 0) return system_error("looking at " + shown);
    auto mapping = std::make_shared<Mapping>();
    mapping->device = info.st_dev;
    mapping->inode = info.st_ino;
    if (info.st_size > 0) {
        const auto size = static_cast<std::uint64_t>(info.st_size);
        void* p = map_shared(fd, size, PROT_READ | (access == Access::Write ? PROT_WRITE : 0));
        if (p == MAP_FAILED) return system_error("mapping " + shown);
        ::madvise(p, size, MADV_DONTFORK);  // a forked child is not the writer
        ::madvise(p, size, MADV_DONTDUMP);
        mapping->base = static_cast<std::byte*>(p);
        mapping->size = size;
    }
    *out = std::move(mapping);
    return {};
}

void fault_in(const Mapping& mapping, Access access) {
    constexpr int kPopulateRead = 22, kPopulateWrite = 23;  // since Linux 5.14; older headers lack the names
    if (mapping.base == nullptr) return;
    if (::madvise(mapping.base, mapping.size, access == Access::Write ? kPopulateWrite : kPopulateRead) == 0) return;
    for (std::uint64_t at = 0; at < mapping.size; at += 4096) {
        auto* byte = reinterpret_cast<volatile unsigned char*>(mapping.base + at);
        const unsigned char value = *byte;
        if (access == Access::Write) *byte = value;
    }
}

void IdleMappings::put(std::shared_ptr<Mapping> mapping) {
    const File file{mapping->device, mapping->inode};
    (void)take(file.first, file.second);  // two streams of one reader may have had it, one after the other
    by_age_.emplace(++now_, file);
    by_file_.emplace(file, Idle{std::move(mapping), now_});
    if (by_file_.size() <= kMost) return;
    by_file_.erase(by_age_.begin()->second);
    by_age_.erase(by_age_.begin());
}

std::shared_ptr<Mapping> IdleMappings::take(std::uint64_t device, std::uint64_t inode) {
    const auto it = by_file_.find({device, inode});
    if (it == by_file_.end()) return nullptr;
    auto mapping = std::move(it->second.mapping);
    by_age_.erase(it->second.since);
    by_file_.erase(it);
    return mapping;
}

std::uint64_t boot_hash(const std::string& text) {
    std::string id = text;
    if (id.empty()) read_file(AT_FDCWD, "/proc/sys/kernel/random/boot_id", &id);
    const auto hash = hash64(std::as_bytes(std::span(id.data(), id.size())));
    return hash == 0 ? 1 : hash;
}

}  // namespace ftcomm::pairlog
