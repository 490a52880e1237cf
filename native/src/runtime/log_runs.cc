#include "runtime/log_runs.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <system_error>

#include "base/random.h"
#include "pairlog/identity.h"
#include "runtime/handoff_wire.h"
#include "runtime/io_loop.h"

namespace ftcomm {
namespace {

namespace fs = std::filesystem;

constexpr int kAttempts = 64;
constexpr Time kBetweenLockTries = 1'000'000;
constexpr std::size_t kNameLength = 16;
constexpr const char* kRemoved = ".removed-";
constexpr const char* kKept = "kept";
constexpr const char* kElsewhere = "elsewhere";  // the job has ranks on other hosts
constexpr const char* kSpill = "spill";          // the path of what goes with it
constexpr std::time_t kPatience = 3600;  // seconds for a replacement, on a host where the job has no process left

// A log_dir may hold anything: what has no name as Job::open_log gives it is none of ours.
bool is_run(const std::string& name) {
    return name.size() == kNameLength && name.find_first_not_of("0123456789abcdef") == std::string::npos;
}
bool is_removed(const std::string& name) {
    return is_run(name.substr(0, kNameLength)) && name.substr(kNameLength).starts_with(kRemoved);
}

// Whether the folder that is open still has this name.
bool leads_to(int at, const std::string& path, int folder) {
    struct stat named{}, info{};
    return ::fstatat(at, path.c_str(), &named, 0) == 0 && ::fstat(folder, &info) == 0 && named.st_dev == info.st_dev &&
           named.st_ino == info.st_ino;
}

pairlog::Fd open_parent(const fs::path& path) {
    return pairlog::Fd(::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

Status write_note(int folder, const char* name, const std::string& text) {
    const pairlog::Fd made(::openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!made || ::write(made.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
        return pairlog::system_error(std::string("writing the file \"") + name + "\" in the log's folder");
    return {};
}

std::string read_note(int folder, const char* name) {
    char text[4096];
    const pairlog::Fd note(::openat(folder, name, O_RDONLY | O_CLOEXEC));
    const auto n = note ? ::read(note.get(), text, sizeof text) : -1;
    return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : std::string();
}

// A run that nobody uses loses its name, and its spill folder too. Who would use it meanwhile waits for the lock, then finds
// that the folder is gone and makes another: nothing is removed in which a living process of the run has made anything.
void take_name(int parent, const std::string& run) {
    pairlog::Fd folder;
    pairlog::UseLock alone;
    if (!pairlog::open_folder(parent, run, false, &folder)) return;
    const auto has = [&](const char* name) { return ::faccessat(folder.get(), name, F_OK, 0) == 0; };
    if (has(kKept)) return;
    struct stat info{};
    if (::fstatat(folder.get(), kElsewhere, &info, 0) == 0 && std::time(nullptr) - info.st_mtime < kPatience) return;
    if (!has(pairlog::UseLock::kName) && !has(pairlog::kIdentityName)) {
        (void)::unlinkat(parent, run.c_str(), AT_REMOVEDIR);  // if empty: one that never began. Else it is somebody else's
        return;
    }
    if (!alone.take(folder.get(), pairlog::UseLock::Kind::Alone) || !leads_to(parent, run, folder.get())) return;
    const auto name = removed_name(run);
    const fs::path spilled = read_note(folder.get(), kSpill), gone = spilled.parent_path() / name;
    std::error_code ignored;
    if (spilled.filename() == run) fs::rename(spilled, gone, ignored);
    (void)::renameat(parent, run.c_str(), parent, name.c_str());
    alone = {};  // who waits for it need not wait for this
    if (spilled.filename() == run) remove_wholly(gone);
}

}  // namespace

std::string removed_name(const std::string& run) {
    char end[64];
    std::snprintf(end, sizeof end, "%s%d-%016" PRIx64, kRemoved, static_cast<int>(::getpid()), os_random64());
    return run + end;
}

Status make_parent(const std::string& path) {
    const auto parent = fs::path(path).parent_path();
    std::error_code why;
    fs::create_directories(parent.parent_path(), why);
    struct stat info{};
    if (::mkdir(parent.c_str(), 0700) != 0 && errno != EEXIST)
        return Status::error(Code::System, "log_dir " + parent.string() + ": " + std::strerror(errno) + ". Give another folder");
    // Gone again: with the last run in it.
    if (::stat(parent.c_str(), &info) == 0 && info.st_uid != ::geteuid())
        return Status::error(Code::System, "log_dir " + parent.string() + " belongs to another user. Give another folder");
    return {};
}

Status use_run(const std::string& path, Time deadline, int stop_fd, pairlog::Fd* folder, pairlog::UseLock* used) {
    for (int lost = 0; lost < kAttempts;) {
        if (auto s = make_parent(path); !s) return s;
        pairlog::Fd found;
        if (auto s = pairlog::open_folder(AT_FDCWD, path, true, &found); !s) {
            if (s.code != Code::System || errno != ENOENT) return s;
            ++lost;
            continue;
        }
        const int refused = used->take(found.get(), pairlog::UseLock::Kind::Shared) ? 0 : errno;
        if (!leads_to(AT_FDCWD, path, found.get())) {
            *used = {};
            ++lost;
        } else if (refused == 0) {
            *folder = std::move(found);
            return {};
        } else if (refused != EAGAIN) {
            errno = refused;
            return pairlog::system_error("locking " + path + "/" + pairlog::UseLock::kName);
        } else if (deadline != 0 && IoLoop::now() >= deadline) {
            return Status::error(Code::Timeout, "a process that removes the logs of earlier runs has stopped in " + path +
                                                    ": end it, it has the file \"" + pairlog::UseLock::kName + "\" there open");
        } else if (handoff::wait_ready(stop_fd, POLLIN, IoLoop::now() + kBetweenLockTries, stop_fd) != 0) {
            return Status::error(Code::Closed, "the job was closed while it started");
        }
    }
    return Status::error(Code::System, "the log's folder " + path + " is removed as often as it is made: give another log_dir");
}

void remove_old_runs(const std::string& path, const std::string& spill_path) {
    const auto own = fs::path(path).filename().string();
    const auto parent = open_parent(path);
    struct stat info{};
    if (!parent || ::fstat(parent.get(), &info) != 0 || info.st_uid != ::geteuid()) return;
    for (const auto& run : pairlog::list_folder(parent.get()))
        if (is_run(run) && run != own) take_name(parent.get(), run);
    // Of others as well, who may have died before they came to it.
    for (const auto& name : pairlog::list_folder(parent.get()))
        if (is_removed(name)) remove_wholly(fs::path(path).parent_path() / name);
    const auto spill_parent = spill_path.empty() ? pairlog::Fd() : open_parent(spill_path);
    if (!spill_parent) return;
    for (const auto& name : pairlog::list_folder(spill_parent.get()))
        if (is_removed(name)) remove_wholly(fs::path(spill_path).parent_path() / name);
}

Status note_run(int folder, const RunNotes& notes) {
    if (notes.kept)
        if (auto s = write_note(folder, kKept, ""); !s) return s;
    if (notes.elsewhere)
        if (auto s = write_note(folder, kElsewhere, "."); !s) return s;  // and so a new time
    return notes.spill.empty() ? Status{} : write_note(folder, kSpill, notes.spill);
}

std::string parent_of_runs() { return "/dev/shm/ftcomm-logs-" + std::to_string(::getuid()); }

void remove_wholly(const fs::path& folder) {
    std::error_code ignored;
    for (int i = 0; fs::exists(folder, ignored) && i < 1000; ++i) {
        std::error_code disturbed;
        fs::remove_all(folder, disturbed);
    }
}

}  // namespace ftcomm
