#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "pairlog/files.h"

namespace ftcomm::pairlog {
namespace {

// A lock by fcntl belongs to the process: a second taker in the same one would get it too, and its end would end it.
struct Held {
    std::mutex mutex;
    std::set<std::pair<std::uint64_t, std::uint64_t>> inodes;
    pid_t process = 0;
};

Held& held() {
    static auto* all = new Held;  // never destroyed: locks may end after it
    return *all;
}

}  // namespace

bool FileLock::take(int folder, const std::string& name, int* holder) {
    *holder = 0;
    Held& all = held();
    std::lock_guard guard(all.mutex);
    if (std::exchange(all.process, ::getpid()) != ::getpid()) all.inodes.clear();  // after fork: the parent's locks
    struct stat info{};
    // Looked at by name first: opening and closing the file would end a lock that this process has.
    if (::fstatat(folder, name.c_str(), &info, 0) == 0 && all.inodes.contains({info.st_dev, info.st_ino})) {
        *holder = ::getpid();
        return false;
    }
    Fd fd(::openat(folder, name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!fd || ::fstat(fd.get(), &info) != 0) return false;
    struct flock lock{};
    lock.l_type = F_WRLCK;
    if (::fcntl(fd.get(), F_SETLK, &lock) != 0) {
        if (::fcntl(fd.get(), F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK) *holder = lock.l_pid;
        return false;
    }
    // Who held it meanwhile may have removed the file: then this is a lock on nothing that anybody finds.
    struct stat named{};
    if (::fstatat(folder, name.c_str(), &named, 0) != 0 || named.st_dev != info.st_dev || named.st_ino != info.st_ino)
        return false;
    inode_ = {info.st_dev, info.st_ino};
    all.inodes.insert(inode_);
    fd_ = std::move(fd);
    return true;
}

FileLock::~FileLock() {
    if (!fd_) return;
    std::lock_guard guard(held().mutex);
    held().inodes.erase(inode_);
    fd_ = Fd();
}

bool UseLock::take(int folder, Kind kind) {
    Fd fd(::openat(folder, kName, O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    struct flock lock{};
    lock.l_type = kind == Kind::Alone ? F_WRLCK : F_RDLCK;
    if (!fd || ::fcntl(fd.get(), F_OFD_SETLK, &lock) != 0) return false;
    fd_ = std::move(fd);
    return true;
}

}  // namespace ftcomm::pairlog
