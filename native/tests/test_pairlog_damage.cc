// What is not as it was written is told, with the stream and the record; what is another's is refused.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "base/crc32c.h"
#include "tests/pairlog_rig.h"

namespace ftcomm::pairlog {
namespace {

Status open_error(const LogConfig& config) {
    std::unique_ptr<LogDir> dir;
    return LogDir::open(config, &dir);
}

Status writer_error(const LogConfig& config) {
    auto dir = open_log(config);
    std::unique_ptr<StreamWriter> writer;
    return StreamWriter::open(*dir, kKey, &writer);
}

// Records 1 to 5 of 1000 bytes each in one segment: where record n's header is.
void five(const LogConfig& config) {
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    for (int i = 0; i < 5; ++i) REQUIRE(add(*writer, 1000).ok());
}
constexpr std::uint64_t header_at(std::uint64_t seq) { return kFirstRecord + (seq - 1) * 1088; }

}  // namespace

FT_TEST(pairlog_of_another_job_is_refused) {
    Folder folder;
    { auto dir = open_log(folder.config()); }
    auto config = folder.config();
    config.job = "other";
    auto status = open_error(config);
    EXPECT_EQ(status.code, Code::LogCorrupt);
    EXPECT(contains(status.message, "is of job \"test\", this is job \"other\""));
    config = folder.config();
    config.world_size = 9;
    status = open_error(config);
    EXPECT_EQ(status.code, Code::LogCorrupt);
    EXPECT(contains(status.message, "with 8 ranks, this one has 9"));
    config = folder.config();
    config.scope = "0,1/2,3";  // other messages are in it: who runs again would look for some of them in vain
    status = open_error(config);
    EXPECT_EQ(status.code, Code::LogCorrupt);
    EXPECT(contains(status.message, "log is \"all\" there, \"0,1/2,3\" here"));
    std::ofstream(folder.path + "/log/job") << "ftcomm pair log\nversion 99\nworld_size 8\njob test\n";
    EXPECT(contains(open_error(folder.config()).message, "version 99 of the format"));
    std::ofstream(folder.path + "/log/job") << "nonsense";
    EXPECT(contains(open_error(folder.config()).message, "damaged file \"job\""));
    REQUIRE(chmod((folder.path + "/log").c_str(), 0777) == 0);
    EXPECT(contains(open_error(folder.config()).message, "others may write"));
    REQUIRE(chmod((folder.path + "/log").c_str(), 0700) == 0);
    if (geteuid() == 0) REQUIRE(chown((folder.path + "/log").c_str(), 12345, 0) == 0);
    config = folder.config();
    if (geteuid() != 0) config.path = "/usr";
    status = open_error(config);
    EXPECT_EQ(status.code, Code::LogCorrupt);
    EXPECT(contains(status.message, geteuid() == 0 ? "belongs to user 12345" : "belongs to user 0"));
}

FT_TEST(pairlog_is_removed_only_if_it_is_one) {
    Folder folder;
    five(folder.config());
    EXPECT_EQ(LogDir::remove(folder.path).code, Code::Invalid);
    EXPECT(LogDir::remove(folder.path + "/log").ok());
    EXPECT(access((folder.path + "/log").c_str(), F_OK) != 0);
}

FT_TEST(pairlog_flipped_bit_in_a_payload) {
    Folder folder;
    five(folder.config());
    flip(folder.segment(1), header_at(3) + 64 + 500);
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);  // payloads are looked at when they are wanted
    auto reader = open_reader(*dir, Role::Observer);
    RecordInfo info;
    ByteView view;
    for (int who = 0; who < 2; ++who) {
        const auto find = [&](std::uint64_t seq, bool verify) {
            return who == 0 ? writer->find(seq, &info, &view, verify) : reader->find(seq, &info, &view, verify);
        };
        EXPECT(find(2, true).ok());
        EXPECT(find(4, true).ok());
        EXPECT(find(3, false).ok());
        const auto status = find(3, true);
        EXPECT_EQ(status.code, Code::LogCorrupt);
        EXPECT(contains(status.message, "record 3 of the log 3->5 of communicator ab is damaged: its 1000 bytes"));
    }
}

FT_TEST(pairlog_corrupt_at_the_failpoint) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    REQUIRE(fault::configure("rank=0,at=log.payload.after:2,do=corrupt", 0, 0).ok());
    for (int i = 0; i < 3; ++i) REQUIRE(add(*writer, 100).ok());
    fault::configure("", 0, 0);
    RecordInfo info;
    ByteView view;
    EXPECT(writer->find(1, &info, &view).ok());
    EXPECT_EQ(writer->find(2, &info, &view).code, Code::LogCorrupt);
    EXPECT(writer->find(3, &info, &view).ok());
}

FT_TEST(pairlog_flipped_bit_in_a_header_is_no_torn_tail) {
    for (const std::uint64_t seq : {1, 3, 5}) {
        Folder folder;
        five(folder.config());
        flip(folder.segment(1), header_at(seq) + 22 + 2 * seq);  // length, tag, signature
        auto status = writer_error(folder.config());
        EXPECT_EQ(status.code, Code::LogCorrupt);
        EXPECT(contains(status.message, "record " + std::to_string(seq) + " of the log 3->5 of communicator ab"));
        EXPECT(contains(status.message, "up to 5 were committed"));
        auto dir = open_log(folder.config());
        auto reader = open_reader(*dir, Role::Observer);
        RecordInfo info;
        ByteView view;
        EXPECT_EQ(reader->find(5, &info, &view).code, Code::LogCorrupt);
        if (seq > 1) EXPECT(reader->find(seq - 1, &info, &view).ok());
    }
}

FT_TEST(pairlog_damaged_header_in_an_older_segment) {
    Folder folder;
    {
        auto dir = open_log(folder.config());
        auto writer = open_writer(*dir);
        for (int i = 0; i < 200; ++i) REQUIRE(add(*writer, 1000).ok());
    }
    flip(folder.segment(1), header_at(3) + 26);
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    RecordInfo info;
    ByteView view;
    EXPECT(writer->find(200, &info, &view).ok());
    EXPECT(contains(writer->find(3, &info, &view).message, "record 3 of"));
}

FT_TEST(pairlog_torn_tail_is_dropped) {
    Folder folder;
    EXPECT(killed(child_with("rank=0,at=log.watermark.before:5,do=kill", [&] { five(folder.config()); })));
    flip(folder.segment(1), header_at(5) + 64 + 10);  // whole header, but not the payload that it promises
    {
        auto dir = open_log(folder.config());
        auto writer = open_writer(*dir);
        EXPECT_EQ(writer->last_seq(), 4u);
        EXPECT(holds_all(*writer));
        REQUIRE(add(*writer, 50).ok());
    }
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), 5u);
    EXPECT(holds_all(*writer));
}

// Whatever is the first thing that there is no descriptor for: the log is not damaged.
FT_TEST(pairlog_what_cannot_be_read_for_want_of_descriptors_is_not_damaged) {
    Folder folder;
    auto config = folder.spilling(6);
    {
        auto dir = open_log(config);
        auto writer = open_writer(*dir);
        for (int i = 0; i < 60; ++i) REQUIRE(add(*writer, 10000).ok());
    }
    for (const bool writes : {true, false}) {
        const int status = child_with("", [&] {
            auto dir = open_log(config);
            const int next = ::dup(0);
            ::close(next);
            int refused = 0;
            for (int more = 0; more < 40; ++more) {
                const rlimit limit{static_cast<rlim_t>(next + more), static_cast<rlim_t>(next + 40)};
                if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(97);
                std::unique_ptr<StreamWriter> writer;
                std::unique_ptr<StreamReader> reader;
                RecordInfo info;
                ByteView view;
                auto s =
                    writes ? StreamWriter::open(*dir, kKey, &writer) : StreamReader::open(*dir, kKey, Role::Observer, &reader);
                if (s && reader != nullptr) s = reader->find(30, &info, &view);
                if (s && writer != nullptr) s = writer->find(30, &info, &view);
                if (s) _exit(refused > 2 ? 42 : 1);
                if (s.code != Code::System) {
                    std::fprintf(stderr, "%d more: %s\n", more, s.message.c_str());
                    _exit(2);
                }
                ++refused;
            }
            _exit(3);
        });
        EXPECT_EQ(WEXITSTATUS(status), 42);
    }
}

FT_TEST(pairlog_truncated_missing_and_foreign_files) {
    const auto broken = [](const char* part, auto breakage) {
        Folder folder;
        {
            auto dir = open_log(folder.config());
            auto writer = open_writer(*dir);
            for (int i = 0; i < 200; ++i) REQUIRE(add(*writer, 1000).ok());
        }
        breakage(folder);
        const auto status = writer_error(folder.config());
        EXPECT_EQ(status.code, Code::LogCorrupt);
        EXPECT(contains(status.message, "3->5 of communicator ab"));
        EXPECT(contains(status.message, part));
    };
    const auto truncate_to = [](const std::string& path, off_t size) { REQUIRE(truncate(path.c_str(), size) == 0); };
    broken("truncated", [&](Folder& f) { truncate_to(f.segment(2), 100); });
    broken("its header says 64.0 KiB", [&](Folder& f) { truncate_to(f.segment(2), 8192); });
    broken("index is truncated", [&](Folder& f) { truncate_to(f.stream() + "/index", 64); });
    broken("segment 2 is missing", [&](Folder& f) { std::remove(f.segment(2).c_str()); });
    broken("was not collected", [&](Folder& f) { std::remove(f.segment(1).c_str()); });
    broken("were committed", [&](Folder& f) {
        for (std::uint64_t i = 1; i < 9; ++i) std::remove(f.segment(i).c_str());
    });
    broken("were committed", [&](Folder& f) {
        std::uint64_t last = 1;
        while (access(f.segment(last + 1).c_str(), F_OK) == 0) ++last;
        std::remove(f.segment(last).c_str());
    });
    broken("the header of segment 2", [&](Folder& f) { flip(f.segment(2), 40); });
    broken("does not begin like a segment", [&](Folder& f) { flip(f.segment(2), 2); });
    broken("segment 2 has version 6", [&](Folder& f) { flip(f.segment(2), 8); });
    broken("its index has version 6", [&](Folder& f) { flip(f.stream() + "/index", 8); });
    broken("head of its index", [&](Folder& f) { flip(f.stream() + "/index", 16); });
    broken("is segment 1 of", [&](Folder& f) {
        std::filesystem::copy_file(f.segment(1), f.segment(2), std::filesystem::copy_options::overwrite_existing);
    });
}

}  // namespace ftcomm::pairlog
