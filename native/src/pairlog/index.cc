#include "pairlog/index.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/crc32c.h"

namespace ftcomm::pairlog {
namespace {

struct Fixed {  // the first line of Index, as far as it is used
    std::uint64_t magic = kIndexMagic;
    std::uint32_t version = kVersion;
    std::uint32_t crc = 0;
    std::uint64_t comm;
    std::int32_t src;
    std::int32_t dst;
};
static_assert(sizeof(Fixed) == 32);

Fixed fixed(const StreamKey& key) {
    Fixed line{.comm = key.comm, .src = key.src, .dst = key.dst};
    line.crc = crc32c(&line, sizeof line);
    return line;
}

}  // namespace

Status IndexFile::create(int folder, const StreamKey& key) {
    bool absent = false;
    auto status = open(folder, key, &absent);
    if (!absent) return status;
    // Whole before it has its name; the writer's lock keeps others from the same.
    const std::string shown = "the index of the log " + text_of(key), name = "index.new";
    ::unlinkat(folder, name.c_str(), 0);
    Fd fd(::openat(folder, name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!fd) return system_error("making " + shown);
    if (status = reserve(fd.get(), kPage, shown); !status) return status;
    const Fixed line = fixed(key);
    if (status = write_all(fd.get(), &line, sizeof line); !status) return std::move(status).within(shown);
    if (::fdatasync(fd.get()) != 0 || ::renameat(folder, name.c_str(), folder, kIndexName) != 0)
        return system_error("making " + shown);
    return open(folder, key, &absent);
}

Status IndexFile::open(int folder, const StreamKey& key, bool* absent) {
    *absent = false;
    Fd fd(::openat(folder, kIndexName, O_RDWR | O_CLOEXEC));
    if (!fd) {
        *absent = errno == ENOENT;
        return system_error("opening the index of the log " + text_of(key));
    }
    std::shared_ptr<Mapping> file;
    if (auto status = map_file(fd.get(), Access::Write, "the index of the log " + text_of(key), &file); !status) return status;
    if (file->size != kPage) return damaged(key, 0, "its index is truncated to " + size_text(file->size));
    Fixed found, want = fixed(key);
    std::memcpy(&found, file->base, sizeof found);
    if (found.magic == kIndexMagic && found.version != kVersion)
        return damaged(key, 0,
                       "its index has version " + std::to_string(found.version) + " of the format, this ftcomm has " +
                           std::to_string(kVersion) + ": remove the folder, or go on with the ftcomm that wrote it");
    if (std::memcmp(&found, &want, sizeof found) != 0)
        return damaged(key, 0, "the head of its index does not match its checksum");
    file_ = std::move(file);
    return {};
}

Status IndexFile::sync() const {
    if (::msync(file_->base, file_->size, MS_SYNC) != 0) return system_error("syncing the index of a log");
    return {};
}

}  // namespace ftcomm::pairlog
