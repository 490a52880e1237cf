// Segments of a stream that logs much, and memory in huge pages.
#include <fcntl.h>
#include <sys/stat.h>

#include "base/crc32c.h"
#include "tests/pairlog_rig.h"

namespace ftcomm::pairlog {
namespace {

std::uint64_t file_size(const std::string& path) {
    struct stat info{};
    return stat(path.c_str(), &info) == 0 ? static_cast<std::uint64_t>(info.st_size) : 0;
}

}  // namespace

FT_TEST(pairlog_segments_grow_with_their_stream) {
    Folder folder;
    auto config = folder.config();
    config.grown_bytes = 4 * kSmall;
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Observer);
    const auto fill = [&] {
        const auto goal = writer->last_seq() + 150;
        while (writer->last_seq() < goal) REQUIRE(add(*writer, 10000).ok());
    };
    fill();
    EXPECT_EQ(file_size(folder.segment(1)), kSmall);
    EXPECT_EQ(file_size(folder.segment(2)), kSmall);
    EXPECT_EQ(file_size(folder.segment(3)), 2 * kSmall);
    for (std::uint64_t i = 4; i <= 9; ++i) EXPECT_EQ(file_size(folder.segment(i)), 4 * kSmall);
    EXPECT_EQ(file_size(folder.segment(10)), 0u);
    reader->refresh();
    EXPECT(holds_all(*writer) && holds_all(*reader));
    // A record that would leave half of one empty has its own, as without growth.
    REQUIRE(add(*writer, 4 * kSmall).ok());
    EXPECT_EQ(file_size(folder.segment(10)), segment_size_for(4 * kSmall, kSmall));
    // The same memory again, in the same sizes.
    REQUIRE(writer->collect(~std::uint64_t{0}).ok());
    const auto resident = dir->resident();
    const auto before = files_in(folder.path, kSmall);
    EXPECT_EQ(dir->free_bytes(), resident);
    fill();
    EXPECT(files_in(folder.path, kSmall) == before);
    EXPECT_EQ(dir->resident(), resident);
    EXPECT(holds_all(*writer));
    // And by a process that goes on with it.
    const auto last = writer->last_seq();
    writer.reset();
    dir = open_log(config);
    writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), last);
    EXPECT(holds_all(*writer));
}

// What is held stays as it is, though its record has been collected and the segment is free; then it is used again.
FT_TEST(pairlog_held_memory_is_not_written_over) {
    Folder folder;
    auto config = folder.config();
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    REQUIRE(add(*writer, 10000).ok());
    ByteView bytes;
    std::optional<std::uint32_t> sum;
    EXPECT(writer->hold(1, 5000, 5001, &bytes, &sum) == nullptr);
    EXPECT(writer->hold(2, 0, 1, &bytes, &sum) == nullptr);
    auto held = writer->hold(1, 16, 9000, &bytes, &sum);
    REQUIRE(held != nullptr);
    const auto first = files_in(folder.path, kSmall);
    const auto is_there = [&] {
        const auto wanted = content(1, 10000);
        return same(bytes, ByteView(wanted).subspan(16, 9000));
    };
    EXPECT(is_there());
    REQUIRE(writer->collect(1).ok());
    for (int i = 0; i < 40; ++i) REQUIRE(add(*writer, 10000).ok());
    EXPECT(is_there());
    EXPECT(holds_all(*writer));
    // Dropped, it goes when it is let go, though a reader still maps it.
    {
        auto other = open_log([&] {
            auto small = config;
            small.path = folder.path + "/other";
            small.limit = 4 * kSmall;
            return small;
        }());
        auto full = open_writer(*other);
        auto reader = open_reader(*other, Role::Observer);
        REQUIRE(add(*full, 10000).ok());
        reader->refresh();
        EXPECT(holds(*reader, 1));
        auto last = full->hold(1, 0, 10000, &bytes, &sum);
        const auto wanted = content(1, 10000);
        REQUIRE(full->collect(1).ok());
        while (add(*full, 10000)) {}
        EXPECT(same(bytes, wanted));
    }
    held.reset();
    REQUIRE(writer->collect(writer->last_seq()).ok());
    const auto resident = dir->resident();
    for (int i = 0; i < 40; ++i) REQUIRE(add(*writer, 10000).ok());
    EXPECT_EQ(dir->resident(), resident);
    // Of an open record what is published.
    std::byte* to = nullptr;
    RecordInfo info;
    info.length = 3000;
    REQUIRE(writer->begin(info, &to).ok());
    const auto whole = content(writer->last_seq() + 1, 3000);
    EXPECT(writer->room(16, 10) == nullptr && writer->room(0, 3001) == nullptr);
    writer->put(ByteView(whole).first(1000));
    held = writer->hold(writer->last_seq() + 1, 0, 1000, &bytes, &sum);
    EXPECT(held != nullptr && same(bytes, ByteView(whole).first(1000)));
    EXPECT(writer->hold(writer->last_seq() + 1, 0, 1001, &bytes, &sum) == nullptr);
    // What is put where it goes is summed there.
    auto* room = writer->room(1000, 2000);
    REQUIRE(room != nullptr);
    std::copy(whole.begin() + 1000, whole.end(), room);
    writer->put({room, 2000});
    REQUIRE(writer->commit().ok());
    RecordInfo found;
    REQUIRE(writer->find(writer->last_seq(), &found, &bytes).ok());
    EXPECT(same(bytes, whole));
    // Of a long part the checksum, as long as nothing else has been put.
    const auto two = content(1, 256u << 10);
    info.length = two.size();
    REQUIRE(writer->begin(info, &to).ok());
    const auto seq = writer->last_seq() + 1;
    const std::uint64_t part = 128u << 10;
    EXPECT(!sum);
    for (std::uint64_t at = 0; at < two.size(); at += part) {
        writer->put(ByteView(two).subspan(at, part), at == 0 ? Into::Caches : Into::Memory);
        for (const auto from : {std::uint64_t{0}, at}) {
            sum.reset();
            EXPECT(writer->hold(seq, from, part, &bytes, &sum) != nullptr);
            EXPECT_EQ(sum.value_or(1), from == at ? crc32c(two.data() + at, part) : 1);
        }
    }
    REQUIRE(writer->commit().ok());
    EXPECT_EQ(writer->last_record().crc, crc32c(two.data(), two.size()));
    sum.reset();
    EXPECT(writer->hold(seq, part, part, &bytes, &sum) != nullptr && sum == crc32c(two.data() + part, part));
}

// Near the limit there are small ones as before: as much fits, and nothing is spilled for the sake of a larger one.
FT_TEST(pairlog_growth_costs_no_room) {
    std::uint64_t plain = 0;
    for (const auto grown : {std::uint64_t{0}, 8 * kSmall}) {
        Folder folder;
        auto config = folder.config();
        config.limit = 21 * kSmall;
        config.grown_bytes = grown;
        auto dir = open_log(config);
        auto writer = open_writer(*dir), notes = open_writer(*dir, {1, 0, config.world_size});
        while (add(*writer, 10000)) EXPECT(dir->resident() <= config.limit);
        EXPECT(add(*notes, 10000).ok());  // what was kept for it
        EXPECT(holds_all(*writer));
        if (grown == 0) plain = writer->last_seq();
        else EXPECT(writer->last_seq() >= plain);
    }
    Folder folder, disk("/tmp");
    auto config = folder.config();
    config.limit = 21 * kSmall;
    config.grown_bytes = 8 * kSmall;
    config.spill_path = disk.path + "/spill";
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    while (writer->last_seq() < plain) {
        REQUIRE(add(*writer, 10000).ok());
        EXPECT_EQ(dir->spilled(), 0u);
    }
}

// One of up to twice the size is as good, so alternating sizes do not drop each other's memory.
FT_TEST(pairlog_takes_a_larger_free_segment) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    const auto round = [&](std::uint64_t length) {
        REQUIRE(add(*writer, length).ok());
        REQUIRE(writer->collect(~std::uint64_t{0}).ok());
    };
    round(3 * kSmall);
    const auto resident = dir->resident();
    round(2 * kSmall);
    EXPECT_EQ(dir->resident(), resident);
    REQUIRE(add(*writer, kSmall / 2).ok());  // that would be a waste
    EXPECT_EQ(dir->resident(), resident + kSmall);
}

FT_TEST(pairlog_large_segments_have_all_their_blocks) {
    Folder folder;
    auto config = folder.config();
    config.segment_bytes = 5 * kHugePage / 2;
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Observer);
    for (const auto length : {std::uint64_t{100}, 2 * kHugePage, 4 * kHugePage}) REQUIRE(add(*writer, length).ok());
    reader->refresh();
    EXPECT(holds_all(*writer) && holds_all(*reader));
    for (const std::uint64_t i : {1, 2}) {
        struct stat info{};
        REQUIRE(stat(folder.segment(i).c_str(), &info) == 0);
        EXPECT(info.st_blocks * 512 >= info.st_size);
        Fd fd(::open(folder.segment(i).c_str(), O_RDONLY | O_CLOEXEC));
        std::shared_ptr<Mapping> file;
        REQUIRE(map_file(fd.get(), Access::Read, "a segment", &file).ok());
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file->base) % kHugePage, 0u);
    }
}

}  // namespace ftcomm::pairlog
