// Limits, spilling, recycling, and file systems that are full.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <fstream>
#include <set>
#include <thread>
#include <vector>

#include "tests/pairlog_rig.h"

namespace ftcomm::pairlog {

namespace {

// In a child: the folder is a file system of 1 MiB, in a mount namespace of the child's own. Ends with 77 where that is not allowed.
void on_small_tmpfs(const Folder& folder) {
    if (unshare(CLONE_NEWNS) != 0) _exit(77);
    if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) _exit(77);
    if (mount("none", folder.path.c_str(), "tmpfs", 0, "size=1m,mode=700") != 0) _exit(77);
}

}  // namespace

FT_TEST(pairlog_full_leaves_everything_as_it_was) {
    Folder folder;
    auto config = folder.config();
    config.limit = 4 * kSmall;
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    Status status;
    while ((status = add(*writer, 10000))) {}
    EXPECT_EQ(status.code, Code::LogFull);
    EXPECT(contains(status.message, "256.0 KiB of 256.0 KiB (log_limit) are taken, and 64.0 KiB more are needed"));
    EXPECT(contains(status.message, "Raise log_limit, commit_checkpoint more often, or give a folder on disk"));
    const auto last = writer->last_seq();
    EXPECT_EQ(dir->resident(), config.limit);
    EXPECT_EQ(add(*writer, 10000).code, Code::LogFull);
    EXPECT_EQ(add(*writer, 100 * kSmall).code, Code::LogFull);  // never fits
    EXPECT(add(*writer, 100).ok());                             // this does
    EXPECT_EQ(writer->last_seq(), last + 1);
    EXPECT(holds_all(*writer));
    REQUIRE(writer->collect(10).ok());
    EXPECT(add(*writer, 10000).ok());
    EXPECT(holds_all(*writer));
}

FT_TEST(pairlog_spills_the_oldest_segments) {
    Folder folder, disk("/tmp");
    auto config = folder.config();
    config.limit = 4 * kSmall;
    config.spill_path = disk.path + "/spill";
    config.spill_limit = 10 * kSmall;
    auto dir = open_log(config);
    auto first = open_writer(*dir, {1, 0, 1});
    auto second = open_writer(*dir, {1, 0, 2});
    auto reader = open_reader(*dir, Role::Consumer, {1, 0, 1});
    Status status;
    RecordInfo info;
    ByteView held;
    std::uint64_t n = 0;
    while ((status = add(n % 2 == 0 ? *first : *second, n % 11 == 10 ? 2 * kSmall : 10000))) {
        if (++n == 4) {
            reader->refresh();
            REQUIRE(reader->find(1, &info, &held).ok());
        }
        EXPECT(dir->resident() <= config.limit);
    }
    EXPECT_EQ(status.code, Code::LogFull);
    EXPECT(contains(status.message, "the spill folder has reached its limit of 640.0 KiB"));
    EXPECT(contains(status.message, "give more room to spill to"));
    EXPECT(dir->spilled() > 5 * kSmall && dir->spilled() <= config.spill_limit);
    EXPECT(access(folder.segment(1).c_str(), F_OK) != 0);
    EXPECT(same(held, content(1, 10000)));  // spilled meanwhile; the view holds until refresh
    EXPECT(holds_all(*first));
    EXPECT(holds_all(*second));
    reader->refresh();
    EXPECT(holds_all(*reader));
    const auto last = first->last_seq();
    first.reset();
    first = open_writer(*dir, {1, 0, 1});
    EXPECT_EQ(first->last_seq(), last);
    EXPECT(holds_all(*first));
    reader->acknowledge(last);
    REQUIRE(first->collect(last).ok());
    REQUIRE(second->collect(second->last_seq()).ok());
    EXPECT_EQ(dir->spilled(), 0u);
    EXPECT(add(*first, 10000).ok());
}

// It knows an old segment and a new one, has let go of those between, and the one after the old one is collected.
FT_TEST(pairlog_reader_finds_its_way_after_spills_and_collects) {
    Folder folder;
    auto config = folder.spilling(4);
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Observer);
    for (int i = 0; i < 24; ++i) REQUIRE(add(*writer, 10000).ok());   // six to a segment
    reader->refresh();
    EXPECT(holds_all(*reader));
    for (int i = 0; i < 18; ++i) REQUIRE(add(*writer, 10000).ok());
    reader->refresh();
    EXPECT(holds(*reader, 1));
    EXPECT(holds(*reader, 42));
    REQUIRE(writer->collect(13).ok());
    reader->refresh();
    EXPECT(holds(*reader, 17));
    EXPECT(holds_all(*reader));
}

// A process has 65530 mappings, and a job that runs for days may have more spilled segments.
FT_TEST(pairlog_few_spilled_segments_are_mapped_at_once) {
    Folder folder;
    auto config = folder.spilling(6, 2 * kPage);
    const auto mapped = [&] {
        std::ifstream maps("/proc/self/maps");
        std::size_t n = 0;
        for (std::string line; std::getline(maps, line);) n += line.find(config.spill_path) != std::string::npos;
        return n;
    };
    constexpr std::uint64_t kRecords = MappedSpilled::kMost + 300;
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Consumer);
    for (std::uint64_t i = 0; i < kRecords; ++i) REQUIRE(add(*writer, 4000).ok());  // one in each
    REQUIRE(reader->refresh());
    EXPECT(holds(*reader, kRecords - 20));  // past all the others
    EXPECT(mapped() <= MappedSpilled::kMost);
    for (int i = 0; i < 2; ++i) {
        EXPECT(holds_all(*reader));
        EXPECT(mapped() <= MappedSpilled::kMost);
        EXPECT(holds_all(*writer));
        EXPECT(mapped() <= MappedSpilled::kMost);
    }
    // What goes while it is not mapped is gone, and not damaged.
    reader->acknowledge(50);
    REQUIRE(writer->collect(50).ok());
    RecordInfo info;
    ByteView view;
    EXPECT_EQ(reader->find(7, &info, &view).code, Code::Invalid);
    EXPECT(holds(*reader, 51) && holds(*reader, kRecords));
    reader.reset();
    writer.reset();
    dir = open_log(config);
    writer = open_writer(*dir);
    EXPECT(mapped() <= 1);
    EXPECT_EQ(writer->last_seq(), kRecords);
    EXPECT(holds_all(*writer));
    EXPECT(mapped() <= MappedSpilled::kMost);
}

FT_TEST(pairlog_spills_what_it_is_not_writing_to) {
    Folder folder;
    auto config = folder.spilling(5);
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    for (int i = 0; i < 4; ++i) REQUIRE(add(*writer, 4 * kSmall - kPage).ok());  // one record fills nearly all of the limit
    EXPECT(holds_all(*writer));
}

// L8. Fresh pages of a tmpfs cost ten times what used ones cost: once it has what a step needs, the log asks for no more.
FT_TEST(pairlog_steady_state_takes_no_fresh_page) {
    Folder folder;
    auto config = folder.config();
    config.segment_bytes = 1u << 20;
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Consumer);
    std::set<ino_t> files;
    const auto faults = [] {
        rusage now{};
        getrusage(RUSAGE_SELF, &now);
        return now.ru_minflt;
    };
    const Bytes payload = content(1, 300'000);
    RecordInfo info, found;
    ByteView view;
    const auto step = [&] {  // 12 MB are logged, read, and given up at a checkpoint
        for (int i = 0; i < 40; ++i) {
            REQUIRE(writer->append(info, payload).ok());
            reader->refresh();
            REQUIRE(reader->find(reader->last_seq(), &found, &view).ok());
        }
        files.merge(files_in(folder.stream(), 1u << 20));
        reader->acknowledge(reader->last_seq());
        REQUIRE(writer->collect(writer->last_seq()).ok());
    };
    for (int i = 0; i < 4; ++i) step();
    const auto warm = files.size();
    const auto before = faults();
    for (int i = 0; i < 40; ++i) step();
    EXPECT_EQ(files.size(), warm);
#ifdef __SANITIZE_ADDRESS__
    constexpr long kMost = 20'000;  // it takes fresh pages itself
#else
    constexpr long kMost = 3000;
#endif
    EXPECT(faults() - before < kMost);  // 40 steps touch 117,000 pages of the log
}

FT_TEST(pairlog_free_segments_do_not_stay_for_ever) {
    Folder folder;
    auto config = folder.config();
    config.keep_free_ns = 0;
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    for (int i = 0; i < 100; ++i) REQUIRE(add(*writer, 10000).ok());
    const auto peak = dir->resident();
    REQUIRE(writer->collect(99).ok());
    EXPECT(dir->resident() <= 2 * kSmall);
    EXPECT(peak > 10 * kSmall);
    EXPECT(holds_all(*writer));
}

FT_TEST(pairlog_prepares_and_takes_over_free_segments) {
    Folder folder;
    EXPECT(killed(child_with("", [&] {
        auto dir = open_log(folder.config());
        if (!dir->prepare(5) || dir->free_bytes() != 5 * kSmall) _exit(1);
        kill(getpid(), SIGKILL);
    })));
    auto dir = open_log(folder.config());
    EXPECT_EQ(dir->free_bytes(), 5 * kSmall);  // the dead one's
    EXPECT(dir->prepare(6).ok());
    EXPECT_EQ(dir->resident(), 6 * kSmall);
    auto other = open_log(folder.config());
    EXPECT_EQ(other->free_bytes(), 0u);  // the first is alive
    auto writer = open_writer(*dir);
    for (int i = 0; i < 30; ++i) REQUIRE(add(*writer, 10000).ok());
    EXPECT_EQ(dir->resident(), 6 * kSmall);
    EXPECT(holds_all(*writer));
    auto config = folder.config();
    config.limit = 2 * kSmall;
    EXPECT_EQ(open_log(config)->prepare(3).code, Code::LogFull);
}

// When all have died and start again each needs what it had: the first to come would take it, up to a limit that is its own.
FT_TEST(pairlog_free_segments_are_their_owners) {
    Folder folder;
    const int status = child_with("", [&] {
        on_small_tmpfs(folder);
        const auto config_of = [&](int owner) {
            auto config = folder.config();
            config.owner = owner;
            return config;
        };
        for (int owner : {0, 1, 12})
            if (!killed(child_with("", [&] {
                    auto dir = open_log(config_of(owner));
                    if (dir->prepare(4)) kill(getpid(), SIGKILL);
                })))
                _exit(1);
        auto first = open_log(config_of(0)), second = open_log(config_of(1));
        if (first->free_bytes() != 4 * kSmall || second->free_bytes() != 4 * kSmall) _exit(2);
        // 1 MiB has room for 15 of them. Who needs more than there is takes what belongs to nobody alive.
        auto writer = open_writer(*first);
        int n = 0;
        for (; n < 10; ++n)
            if (!add(*writer, 40000)) break;
        if (n != 10 || first->resident() != 10 * kSmall || second->free_bytes() != 4 * kSmall) _exit(3);
        auto other = open_writer(*second, {kKey.comm, kKey.src, kKey.dst + 1});
        for (n = 0; n < 4; ++n)
            if (!add(*other, 40000)) _exit(4);
        Status full;
        while ((full = add(*writer, 40000))) {}
        if (full.code != Code::LogFull || !holds_all(*writer) || !holds_all(*other)) _exit(5);
        _exit(42);
    });
    if (WEXITSTATUS(status) == 77) return;  // not allowed here
    EXPECT_EQ(WEXITSTATUS(status), 42);
}

// Each looks for the pools of dead processes while the others are making theirs.
FT_TEST(pairlog_many_start_at_once) {
    Folder folder;
    constexpr int kProcesses = 4, kStarts = 1500;
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            for (int n = 0; n < kStarts; ++n) {
                std::unique_ptr<LogDir> dir;
                if (!LogDir::open(folder.config(), &dir)) _exit(1);
                if (!dir->prepare(1)) _exit(2);
            }
            _exit(0);
        }
        children.push_back(child);
    }
    for (const pid_t child : children) {
        int status = -1;
        REQUIRE(waitpid(child, &status, 0) == child);
        EXPECT_EQ(WEXITSTATUS(status), 0);
    }
}

FT_TEST(pairlog_file_size_limit) {
    Folder folder;
    EXPECT_EQ(WEXITSTATUS(child_with("",
                                     [&] {
                                         auto dir = open_log(folder.config());
                                         auto writer = open_writer(*dir);
                                         const rlimit limit{kSmall + kPage, kSmall + kPage};
                                         setrlimit(RLIMIT_FSIZE, &limit);
                                         const bool small = add(*writer, 1000).ok(),
                                                    large = add(*writer, 3 * kSmall).code == Code::LogFull;
                                         _exit(small && large && add(*writer, 1000).ok() && writer->last_seq() == 2 ? 42 : 1);
                                     })),
              42);
}

// A file system that is really full: a tmpfs of 1 MiB in a mount namespace of a child's own.
FT_TEST(pairlog_file_system_is_full) {
    Folder folder;
    const int status = child_with("", [&] {
        on_small_tmpfs(folder);
        auto dir = open_log(folder.config());
        auto writer = open_writer(*dir);
        Status full;
        while ((full = add(*writer, 10000))) {}
        const auto last = writer->last_seq();
        if (full.code != Code::LogFull || full.message.find("No space left") == std::string::npos) _exit(1);
        if (last < 60 || !holds_all(*writer)) _exit(2);
        if (add(*writer, 10000).code != Code::LogFull || writer->last_seq() != last) _exit(3);
        if (!writer->collect(30) || !add(*writer, 10000) || !holds_all(*writer)) _exit(4);
        writer.reset();
        writer = open_writer(*dir);
        if (writer->last_seq() != last + 1 || !holds_all(*writer)) _exit(5);
        _exit(42);
    });
    if (WEXITSTATUS(status) == 77) return;  // not allowed here
    EXPECT_EQ(WEXITSTATUS(status), 42);
}

// What comes before is not here, as if it had been given up; the first segment may have been begun already by a process that died.
FT_TEST(pairlog_stream_may_begin_later) {
    for (bool begun : {false, true}) {
        Folder folder;
        {
            auto dir = open_log(folder.config());
            auto writer = open_writer(*dir);
            std::byte* to = nullptr;
            RecordInfo info;
            info.length = 8;
            if (begun) REQUIRE(writer->begin(info, &to).ok());
        }
        {
            auto dir = open_log(folder.config());
            auto writer = open_writer(*dir);
            REQUIRE(writer->skip(41).ok());
            EXPECT_EQ(writer->first_seq(), 42u);
            EXPECT_EQ(writer->last_seq(), 41u);
        }
        auto dir = open_log(folder.config());
        auto writer = open_writer(*dir);
        auto reader = open_reader(*dir, Role::Observer);
        EXPECT_EQ(writer->last_seq(), 41u);
        REQUIRE(add(*writer, 100).ok());
        reader->refresh();
        EXPECT_EQ(reader->first_seq(), 42u);
        EXPECT_EQ(reader->last_seq(), 42u);
        RecordInfo info;
        ByteView payload;
        EXPECT(reader->find(42, &info, &payload).ok());
        EXPECT(same(payload, content(42, 100)));
        EXPECT(!writer->find(41, &info, &payload));
    }
}

}  // namespace ftcomm::pairlog
