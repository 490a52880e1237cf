// The writer is killed at each point; a reader that lives through it, and the successor.
#include <atomic>
#include <map>
#include <thread>

#include "tests/pairlog_rig.h"

// Between processes thread sanitizer sees nothing, and slows the one of them that the other has to keep up with.
#ifndef __SANITIZE_THREAD__

namespace ftcomm::pairlog {
namespace {

struct Watch {  // everything it ever saw as committed stays what it was
    std::unique_ptr<LogDir> dir;
    std::unique_ptr<StreamReader> reader;
    std::map<std::uint64_t, std::uint32_t> seen;
    std::uint64_t bad = 0;

    explicit Watch(const LogConfig& config) : dir(open_log(config)), reader(open_reader(*dir, Role::Consumer)) {}
    void look() {
        reader->refresh();
        RecordInfo info;
        ByteView view;
        for (auto seq = std::max(reader->first_seq(), seen.empty() ? 1 : seen.rbegin()->first); seq <= reader->last_seq();
             ++seq) {
            const auto status = reader->find(seq, &info, &view);
            if (!status && !reader->intact(seq)) continue;
            if (!status) unit::failed(__FILE__, __LINE__, status.message);
            if (!status || info.aux != seq || !same(view, content(seq, view.size()))) ++bad;
            const auto [it, added] = seen.emplace(seq, info.crc);
            if (!added && it->second != info.crc) ++bad;
        }
        if (reader->last_seq() > 6) reader->acknowledge(reader->last_seq() - 6);
    }
};

void work(const LogConfig& config, int records) {
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    for (int i = 0; i < records; ++i) {
        const auto seq = writer->last_seq() + 1;
        if (!add(*writer, seq % 7 == 0 ? 3 * kSmall : seq * 997 % 30000)) _exit(97);
        if (seq % 5 == 0 && !writer->collect(seq - 3)) _exit(97);
    }
}

void kill_everywhere(const LogConfig& config, const char* point) {
    Watch watch(config);
    std::uint64_t last = 0;
    int kills = 0;
    for (int nth = 1; nth <= 9; ++nth) {
        std::atomic<bool> done{false};
        std::thread looking([&] {
            while (!done) watch.look();
        });
        const int status =
            child_with("rank=0,at=" + std::string(point) + ":" + std::to_string(nth) + ",do=kill", [&] { work(config, 80); });
        done = true;
        looking.join();
        EXPECT(killed(status) || (WIFEXITED(status) && WEXITSTATUS(status) == 99));
        kills += killed(status);
        watch.look();
        auto dir = open_log(config);
        auto writer = open_writer(*dir);
        EXPECT(writer->last_seq() >= watch.reader->last_seq());      // nothing that was told is lost
        EXPECT(writer->last_seq() <= watch.reader->last_seq() + 1);  // and only the last may have been untold
        EXPECT(writer->last_seq() >= last);
        last = writer->last_seq();
        EXPECT(holds_all(*writer));
        EXPECT(add(*writer, 1234).ok());  // the successor goes on
        watch.look();
        EXPECT_EQ(watch.reader->last_seq(), last + 1);
        EXPECT(holds(*watch.reader, last + 1));
        last = writer->last_seq();
        EXPECT_EQ(watch.bad, 0u);
    }
    if (kills < 1) unit::failed(__FILE__, __LINE__, std::string(point) + " killed only " + std::to_string(kills) + " times");
}

}  // namespace

FT_TEST(pairlog_kill_at_each_point) {
    for (const char* point :
         {"log.payload.before", "log.payload.after", "log.header.before", "log.header.after", "log.watermark.before",
          "log.watermark.after", "log.roll.before", "log.roll.after", "log.collect.before", "log.collect.after"}) {
        Folder folder;
        kill_everywhere(folder.config(), point);
    }
}

FT_TEST(pairlog_kill_in_a_spill) {
    for (const char* point :
         {"log.spill.before", "log.spill.after", "log.roll.after", "log.collect.before", "log.collect.after"}) {
        Folder folder;
        auto config = folder.spilling(7);
        kill_everywhere(config, point);
    }
}

FT_TEST(pairlog_kill_of_a_consumer) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    for (int i = 0; i < 20; ++i) REQUIRE(add(*writer, 20000).ok());
    EXPECT(killed(child_with("rank=0,at=log.ack:5,do=kill", [&] {
        auto theirs = open_log(folder.config());
        auto reader = open_reader(*theirs, Role::Consumer);
        for (std::uint64_t seq = 1; seq <= 20; ++seq) reader->acknowledge(seq);
    })));
    auto reader = open_reader(*dir, Role::Consumer);
    EXPECT_EQ(reader->acknowledged(), 4u);
    REQUIRE(writer->collect(20).ok());
    EXPECT_EQ(reader->first_seq(), 1u);
    reader->refresh();
    EXPECT_EQ(reader->first_seq(), 5u);
    EXPECT(holds_all(*reader));
}

// Any instant, not only the named ones.
FT_TEST(pairlog_kill_at_any_time) {
    Folder folder;
    auto config = folder.spilling(10);
    Watch watch(config);
    Random random(11);
    for (int round = 0; round < 40; ++round) {
        const pid_t child = fork();
        if (child == 0) {
            work(config, 1'000'000);
            _exit(99);
        }
        const auto end = 1 + random.below(15);
        for (std::uint64_t i = 0; i < end; ++i) {
            watch.look();
            usleep(1000);
        }
        kill(child, SIGKILL);
        int status = 0;
        waitpid(child, &status, 0);
        EXPECT(killed(status));
        watch.look();
        auto dir = open_log(config);
        auto writer = open_writer(*dir);
        EXPECT(writer->last_seq() >= watch.reader->last_seq() && writer->last_seq() <= watch.reader->last_seq() + 1);
        EXPECT(holds_all(*writer));
        EXPECT_EQ(watch.bad, 0u);
    }
    EXPECT(watch.seen.size() > 100);
}

}  // namespace ftcomm::pairlog

#endif
