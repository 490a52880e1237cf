// Durability::Host: after another boot only what was synced counts, and that must be whole.
#include <atomic>
#include <thread>

#include "tests/pairlog_rig.h"

namespace ftcomm::pairlog {
namespace {

LogConfig on_disk(const Folder& folder, const char* boot) {
    auto config = folder.config();
    config.durability = LogConfig::Durability::Host;
    config.boot_id = boot;
    return config;
}

// 30 records over several segments, 20 of them synced.
void write(const Folder& folder) {
    auto dir = open_log(on_disk(folder, "first"));
    auto writer = open_writer(*dir);
    for (int i = 0; i < 30; ++i) {
        REQUIRE(add(*writer, 10000).ok());
        if (i == 19) REQUIRE(writer->flush().ok());
    }
    EXPECT_EQ(writer->synced(), 20u);
}

constexpr std::uint64_t kPlace = 10048 + 64 - 0;   // from one record of 10000 bytes to the next

}  // namespace

FT_TEST(pairlog_same_boot_keeps_what_was_not_synced) {
    Folder folder("/tmp");
    write(folder);
    auto dir = open_log(on_disk(folder, "first"));
    auto writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), 30u);
    EXPECT_EQ(writer->synced(), 20u);
    REQUIRE(writer->flush().ok());
    EXPECT_EQ(writer->synced(), 30u);
}

FT_TEST(pairlog_other_boot_ends_with_what_was_synced) {
    Folder folder("/tmp");
    write(folder);
    flip(folder.segment(5), 2);  // never synced: anything may be there
    for (const char* boot : {"second", "third"}) {
        auto dir = open_log(on_disk(folder, boot));
        auto writer = open_writer(*dir);
        const std::uint64_t last = boot[0] == 's' ? 20 : 23;
        EXPECT_EQ(writer->last_seq(), last);
        EXPECT(holds_all(*writer));
        for (int i = 0; i < 3; ++i) REQUIRE(add(*writer, 10000).ok());
        if (boot[0] == 's') REQUIRE(writer->flush().ok());
        // The first boot's record of the next number, where it was, must not come back behind ours.
        writer.reset();
        writer = open_writer(*dir);
        EXPECT_EQ(writer->last_seq(), last + 3);
    }
    // The third boot's records were not synced.
    auto dir = open_log(on_disk(folder, "fourth"));
    auto writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), 23u);
    REQUIRE(add(*writer, 10000).ok());
    writer.reset();
    writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), 24u);
    EXPECT(holds_all(*writer));
}

FT_TEST(pairlog_synced_records_are_checked_after_a_boot) {
    for (const std::uint64_t offset : {kFirstRecord + kPlace + 20, kFirstRecord + kPlace + 64 + 77}) {
        Folder folder("/tmp");
        write(folder);
        flip(folder.segment(2), offset);
        auto dir = open_log(on_disk(folder, "second"));
        std::unique_ptr<StreamWriter> writer;
        const auto status = StreamWriter::open(*dir, kKey, &writer);
        EXPECT_EQ(status.code, Code::LogCorrupt);
        EXPECT(contains(status.message, "record 8 of the log 3->5"));
    }
    Folder folder("/tmp");
    write(folder);
    std::remove(folder.segment(3).c_str());
    auto dir = open_log(on_disk(folder, "second"));
    std::unique_ptr<StreamWriter> writer;
    EXPECT_EQ(StreamWriter::open(*dir, kKey, &writer).code, Code::LogCorrupt);
}

// A segment that is collected is another stream's at once, and the disk may have its new header and still its old name.
FT_TEST(pairlog_segment_that_was_recycled_may_keep_its_name_after_a_boot) {
    const StreamKey other{kKey.comm, kKey.src, kKey.dst + 1};
    for (const std::uint64_t collected : {13, 0}) {
        Folder folder("/tmp");
        write(folder);
        {
            auto dir = open_log(on_disk(folder, "first"));
            auto writer = open_writer(*dir), theirs = open_writer(*dir, other);
            REQUIRE(writer->flush().ok());
            if (collected > 0) REQUIRE(writer->collect(collected).ok());
            REQUIRE(add(*theirs, 10000).ok());
        }
        for (int ordinal : {1, 2})
            std::filesystem::copy_file(folder.stream(other) + "/" + segment_name(1), folder.segment(ordinal),
                                       std::filesystem::copy_options::overwrite_existing);
        for (const char* boot : {"second", "second", "third"}) {
            auto dir = open_log(on_disk(folder, boot));
            std::unique_ptr<StreamWriter> writer;
            const auto status = StreamWriter::open(*dir, kKey, &writer);
            EXPECT_EQ(status.code, collected > 0 ? Code::Ok : Code::LogCorrupt);
            if (collected == 0) {
                EXPECT(contains(status.message, "record 1 of the log 3->5"));
                EXPECT(std::filesystem::exists(folder.segment(5)));
            } else {
                REQUIRE(writer != nullptr);
                EXPECT_EQ(writer->first_seq(), collected + 1);
                EXPECT_EQ(writer->last_seq(), 30u);
                EXPECT(holds_all(*writer));
            }
        }
    }
    // Nothing of it was synced: then it is empty, whatever is left of it.
    Folder folder("/tmp");
    {
        auto dir = open_log(on_disk(folder, "first"));
        auto writer = open_writer(*dir);
        for (int i = 0; i < 20; ++i) REQUIRE(add(*writer, 10000).ok());
    }
    flip(folder.segment(1), 2);
    for (const char* boot : {"second", "second"}) {
        auto dir = open_log(on_disk(folder, boot));
        auto writer = open_writer(*dir);
        EXPECT_EQ(writer->last_seq(), 0u);
    }
}

FT_TEST(pairlog_flush_runs_beside_the_writer) {
    Folder folder("/tmp");
    auto config = on_disk(folder, "first");
    config.limit = 6 * kSmall;
    config.spill_path = folder.path + "/spill";
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    std::atomic<bool> stop{false};
    std::atomic<int> failed{0};
    std::thread flusher([&] {
        while (!stop) failed += !writer->flush();
    });
    for (int i = 0; i < 300; ++i) {
        REQUIRE(add(*writer, 10000).ok());
        if (i % 100 == 99) REQUIRE(writer->collect(writer->last_seq() - 20).ok());
    }
    stop = true;
    flusher.join();
    EXPECT_EQ(failed.load(), 0);
    REQUIRE(writer->flush().ok());
    EXPECT_EQ(writer->synced(), 300u);
    writer.reset();
    config.boot_id = "second";
    dir = open_log(config);
    writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), 300u);
    EXPECT(holds_all(*writer));
}

}  // namespace ftcomm::pairlog
