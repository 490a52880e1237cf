// The few things that the log wants of the file system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace ftcomm::pairlog {

class Fd {
public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd();
    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

private:
    int fd_ = -1;
};

Status system_error(const std::string& what);  // with errno's text
std::string size_text(std::uint64_t bytes);    // "4.0 GiB"

// Opens a folder of ours, after making it (0700) if it is absent. Others' folders, and those that others may write, are refused.
Status open_folder(int at, const std::string& path, bool make, Fd* out);
Status list_folder(int folder, std::vector<std::string>* out);  // without . and ..
std::vector<std::string> list_folder(int folder);  // for who can do without: empty if it cannot be read
Status write_all(int fd, const void* data, std::size_t size);
bool read_file(int at, const std::string& name, std::string* out);

// Takes the blocks of a new file now: a write into its mapping can't fail for want of space later. LogFull if there are none.
// `huge`: whole huge pages in one piece each, if the file is in memory and the kernel does that: a tenth of the time of small ones, and
// fewer misses in the TLB later. False afterwards: there was none to be had, which may have taken long; do not ask again.
Status reserve(int fd, std::uint64_t bytes, const std::string& shown, bool* huge = nullptr);
inline constexpr std::uint64_t kHugePage = 2u << 20;  // and where a mapping of as much begins

// A file in memory, unmapped with the last user.
struct Mapping {
    std::byte* base = nullptr;
    std::uint64_t size = 0;
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    bool dropped = false;  // its pages go with it, whoever else maps the file
    Mapping() = default;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();
};
enum class Access { Read, Write };
Status map_file(int fd, Access access, const std::string& shown, std::shared_ptr<Mapping>* out);
void fault_in(const Mapping& mapping, Access access);  // all pages at once; a hint

// Mappings of a reader's segments that were recycled: they come again, in whichever stream of their writer, and are known by their inodes,
// which are not given to other files as long as they are mapped. Their memory is not theirs: who drops such a file empties it.
class IdleMappings {
public:
    static constexpr std::size_t kMost = 4096;  // of the 65530 mappings that a process may have
    void put(std::shared_ptr<Mapping> mapping);
    std::shared_ptr<Mapping> take(std::uint64_t device, std::uint64_t inode);  // null: it is none of them
    std::size_t size() const { return by_file_.size(); }

private:
    using File = std::pair<std::uint64_t, std::uint64_t>;
    struct Idle {
        std::shared_ptr<Mapping> mapping;
        std::uint64_t since;
    };
    std::map<File, Idle> by_file_;
    std::map<std::uint64_t, File> by_age_;
    std::uint64_t now_ = 0;
};

// A lock that ends with the process, and that a forked child does not have (a lock by flock it would keep alive).
class FileLock {
public:
    FileLock() = default;
    FileLock(const FileLock&) = delete;
    FileLock& operator=(const FileLock&) = delete;
    ~FileLock();
    // false: somebody else holds it; *holder is then a process id, 0 if unknown.
    bool take(int folder, const std::string& name, int* holder);

private:
    Fd fd_;
    std::pair<std::uint64_t, std::uint64_t> inode_{};
};

// Whether a folder is in use: its users share this lock, on a file in it; who would remove the folder takes it alone. It
// belongs to the open file (Linux's OFD locks), so two users in one process are told apart; a forked child has a copy, and
// merely keeps the folder a little longer.
class UseLock {
public:
    static constexpr const char* kName = "used";
    enum class Kind { Shared, Alone };
    // At once. false: errno says why, EAGAIN that others have it.
    bool take(int folder, Kind kind);

private:
    Fd fd_;
};

// Of the text given, else of the host's boot id. The same within one boot, never 0.
std::uint64_t boot_hash(const std::string& text);

}  // namespace ftcomm::pairlog
