// Folders of runs beside each other: one that is in use stays, the others go.
#include "runtime/log_runs.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include "runtime/file_log.h"
#include "runtime/io_loop.h"
#include "tests/pairlog_rig.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

namespace fs = std::filesystem;

const LogKey kSaid{7, 2, 1};

std::string name_of_run(std::uint64_t run) {
    char name[24];
    std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(run));
    return name;
}
std::string path_of(const pairlog::Folder& folder, std::uint64_t run) { return folder.path + "/job/" + name_of_run(run); }
std::string spill_of(const pairlog::Folder& folder, std::uint64_t run) { return folder.path + "/spill/" + name_of_run(run); }

FileLogConfig config_of(const pairlog::Folder& folder, std::uint64_t run, int slot) {
    FileLogConfig c;
    c.files = folder.config();
    c.files.path = path_of(folder, run);
    c.files.spill_path = spill_of(folder, run);
    c.slot = slot;
    c.remove_old = slot == 2;
    c.hosts = std::vector<std::uint64_t>(8, 1);
    return c;
}

std::unique_ptr<FileLog> open_run(const pairlog::Folder& folder, std::uint64_t run, int slot = 2) {
    std::unique_ptr<FileLog> log;
    if (const auto s = FileLog::open(config_of(folder, run, slot), &log); !s) unit::failed(__FILE__, __LINE__, s.message);
    return log;
}

Status say(FileLog& log, std::uint64_t run) {
    const auto text = pairlog::content(run, 100);
    const ByteView parts[] = {text};
    return log.append(kSaid, 1, 2, parts);
}

// What slot 2 has said is there for others, who look it up by its names.
bool heard(const pairlog::Folder& folder, std::uint64_t run, std::unique_ptr<FileLog>* by) {
    *by = open_run(folder, run, 1);
    LogRecord record;
    return *by != nullptr && (*by)->find(kSaid, 1, &record).ok() && pairlog::same(record.payload, pairlog::content(run, 100)) &&
           fs::exists(spill_of(folder, run) + "/job");
}

// A process that has said something, and lives until it is killed.
class User {
public:
    User(const pairlog::Folder& folder, std::uint64_t run) {
        int ends[2];
        REQUIRE(::pipe(ends) == 0);
        process_ = ::fork();
        if (process_ == 0) {
            auto log = open_run(folder, run);
            const char done = log != nullptr && say(*log, run).ok() ? 1 : 0;
            if (::write(ends[1], &done, 1) == 1)
                for (;;) ::pause();
            ::_exit(1);
        }
        ::close(ends[1]);
        char done = 0;
        EXPECT(::read(ends[0], &done, 1) == 1 && done == 1);
        ::close(ends[0]);
    }
    void kill() {
        if (process_ <= 0) return;
        ::kill(process_, SIGKILL);
        ::waitpid(std::exchange(process_, 0), nullptr, 0);
    }
    ~User() { kill(); }

private:
    pid_t process_ = 0;
};

}  // namespace

// L9. Each starts runs while the others look for those of the dead. Some are left behind, some are removed by their last rank.
FT_TEST(log_runs_that_start_are_not_taken_for_dead) {
    pairlog::Folder folder;
    constexpr std::uint64_t kProcesses = 4, kRounds = 400;
    std::vector<pid_t> children;
    for (std::uint64_t i = 1; i <= kProcesses; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            for (std::uint64_t n = 0; n < kRounds; ++n) {
                const auto run = i << 32 | (n & 1);  // under names that are just being removed
                std::unique_ptr<FileLog> log = open_run(folder, run), other;
                if (log == nullptr) ::_exit(1);
                if (!say(*log, run)) ::_exit(2);
                if (!heard(folder, run, &other)) ::_exit(3);
                if (n % 3 != 0) continue;
                log->remove_if_last();
                other->remove_if_last();
            }
            ::_exit(0);
        }
        children.push_back(child);
    }
    for (const pid_t child : children) {
        int status = -1;
        REQUIRE(::waitpid(child, &status, 0) == child);
        EXPECT_EQ(status, 0);
    }
    const auto last = open_run(folder, 1);
    REQUIRE(last != nullptr);
    for (const auto* parent : {"/job", "/spill"})
        for (const auto& entry : fs::directory_iterator(folder.path + parent))
            EXPECT_EQ(entry.path().filename().string(), name_of_run(1));
    last->remove_if_last();
    EXPECT(fs::is_empty(folder.path + "/job"));  // which may be its user's
}

FT_TEST(log_runs_of_the_dead_are_removed) {
    pairlog::Folder folder;
    User dead(folder, 1), alive(folder, 2);
    const auto here = open_run(folder, 3);
    REQUIRE(here != nullptr && say(*here, 3).ok());
    dead.kill();
    // Of one that died at the very beginning, of one that died while it removed another's, and of a version without "used".
    const std::vector<std::string> left{path_of(folder, 4), path_of(folder, 5) + ".removed-6/rank-1",
                                        spill_of(folder, 5) + ".removed-6", path_of(folder, 9)};
    open_run(folder, 9, 1);
    fs::remove(path_of(folder, 9) + "/used");
    const std::vector<std::string> others{folder.path + "/job/notes", path_of(folder, 6) + "/notes"};
    for (const auto& paths : {left, others})
        for (const auto& path : paths) fs::create_directories(path);
    std::unique_ptr<FileLog> by;
    {
        const auto opener = open_run(folder, 7);
        EXPECT(!fs::exists(path_of(folder, 1)) && !fs::exists(spill_of(folder, 1)));
        EXPECT(heard(folder, 2, &by) && heard(folder, 3, &by));
        for (const auto& path : left) EXPECT(!fs::exists(path));
        for (const auto& path : others) EXPECT(fs::exists(path));
    }
    by.reset();
    alive.kill();
    const auto opener = open_run(folder, 8);
    for (const std::uint64_t run : {2, 7}) EXPECT(!fs::exists(path_of(folder, run)) && !fs::exists(spill_of(folder, run)));
    EXPECT(heard(folder, 3, &by));
}

FT_TEST(log_runs_that_are_kept_stay) {
    pairlog::Folder folder;
    std::unique_ptr<FileLog> log;
    auto config = config_of(folder, 1, 1);
    config.keep = true;
    REQUIRE(FileLog::open(config, &log).ok());
    log.reset();
    open_run(folder, 2, 1);
    const auto opener = open_run(folder, 3);
    EXPECT(fs::exists(path_of(folder, 1)) && fs::exists(spill_of(folder, 1)));
    EXPECT(!fs::exists(path_of(folder, 2)));
}

// A replacement may come to a host on which the job has nobody left.
FT_TEST(log_runs_of_several_hosts_are_left_for_an_hour) {
    pairlog::Folder folder;
    std::unique_ptr<FileLog> log;
    auto config = config_of(folder, 1, 1);
    config.hosts[3] = 2;
    REQUIRE(FileLog::open(config, &log).ok());
    log.reset();
    open_run(folder, 2);
    EXPECT(fs::exists(path_of(folder, 1)));
    const auto note = path_of(folder, 1) + "/elsewhere";
    fs::last_write_time(note, fs::last_write_time(note) - std::chrono::minutes(61));
    open_run(folder, 3);
    EXPECT(!fs::exists(path_of(folder, 1)));
}

// Where only the log's place is known.
FT_TEST(log_runs_take_along_what_they_have_spilled) {
    pairlog::Folder folder;
    open_run(folder, 1, 1);
    EXPECT(fs::exists(spill_of(folder, 1)));
    remove_old_runs(path_of(folder, 9), "");
    EXPECT(!fs::exists(path_of(folder, 1)) && !fs::exists(spill_of(folder, 1)));
}

// Where a remover stops in the middle, who starts does not wait for ever, and can be interrupted.
FT_TEST(log_runs_wait_for_a_remover_ends) {
    pairlog::Folder folder;
    const auto path = path_of(folder, 1);
    fs::create_directories(path);
    pairlog::Fd remover(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    pairlog::UseLock alone;
    REQUIRE(alone.take(remover.get(), pairlog::UseLock::Kind::Alone));
    auto config = config_of(folder, 1, 2);
    const pairlog::Fd stop(::eventfd(1, EFD_CLOEXEC));
    std::unique_ptr<FileLog> log;
    config.deadline = IoLoop::now();
    EXPECT(FileLog::open(config, &log).code == Code::Timeout);
    config.deadline = 0;
    config.stop_event = stop.get();
    EXPECT(FileLog::open(config, &log).code == Code::Closed);
    EXPECT(log == nullptr);
    alone = {};
    EXPECT(FileLog::open(config, &log).ok());
    // As long as it lives, whoever else comes or goes.
    EXPECT(open_run(folder, 1, 1) != nullptr);
    EXPECT(!alone.take(remover.get(), pairlog::UseLock::Kind::Alone) && errno == EAGAIN);
    log.reset();
    EXPECT(alone.take(remover.get(), pairlog::UseLock::Kind::Alone));
}

}  // namespace ftcomm
