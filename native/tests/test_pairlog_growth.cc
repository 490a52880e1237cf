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
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    REQUIRE(add(*writer, 10000).ok());
    EXPECT(writer->hold(1, 5000, 5001).by == nullptr);
    EXPECT(writer->hold(2, 0, 1).by == nullptr);
    auto held = writer->hold(1, 16, 9000);
    REQUIRE(held.by != nullptr);
    const auto wanted = content(1, 10000);
    const auto is_there = [&] { return same(held.bytes, ByteView(wanted).subspan(16, 9000)); };
    EXPECT(is_there());
    REQUIRE(writer->collect(1).ok());
    for (int i = 0; i < 40; ++i) REQUIRE(add(*writer, 10000).ok());
    EXPECT(is_there());
    EXPECT(holds_all(*writer));
    held = {};
    REQUIRE(writer->collect(writer->last_seq()).ok());
    const auto resident = dir->resident();
    for (int i = 0; i < 40; ++i) REQUIRE(add(*writer, 10000).ok());
    EXPECT_EQ(dir->resident(), resident);
}

// One that is dropped goes when it is let go, though a reader still maps it.
FT_TEST(pairlog_held_memory_is_given_back) {
    Folder folder;
    auto config = folder.config();
    config.limit = 4 * kSmall;
    auto dir = open_log(config);
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Observer);
    REQUIRE(add(*writer, 10000).ok());
    reader->refresh();
    RecordInfo info;
    ByteView seen;
    REQUIRE(reader->find(1, &info, &seen).ok());
    auto held = writer->hold(1, 0, 10000);
    REQUIRE(writer->collect(1).ok());
    while (add(*writer, 10000)) {}
    EXPECT(same(held.bytes, content(1, 10000)) && same(seen, held.bytes));
    held = {};
    EXPECT(same(seen, Bytes(10000)));
}

FT_TEST(pairlog_open_records_are_held_and_written_in_place) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    std::byte* to = nullptr;
    RecordInfo info;
    info.length = 3000;
    REQUIRE(writer->begin(info, &to).ok());
    const auto whole = content(1, 3000);
    EXPECT(writer->room(16, 10) == nullptr && writer->room(0, 3001) == nullptr);
    writer->put(ByteView(whole).first(1000));
    const auto held = writer->hold(1, 0, 1000);
    EXPECT(held.by != nullptr && same(held.bytes, ByteView(whole).first(1000)));
    EXPECT(writer->hold(1, 0, 1001).by == nullptr);
    // What is put where it goes is summed there.
    auto* room = writer->room(1000, 2000);
    REQUIRE(room != nullptr);
    std::copy(whole.begin() + 1000, whole.end(), room);
    writer->put({room, 2000});
    REQUIRE(writer->commit().ok());
    RecordInfo found;
    ByteView bytes;
    REQUIRE(writer->find(1, &found, &bytes).ok());
    EXPECT(same(bytes, whole));
}

FT_TEST(pairlog_newest_part_is_held_with_its_checksum) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    const std::uint64_t part = 128u << 10;
    const auto whole = content(1, 2 * part);
    std::byte* to = nullptr;
    RecordInfo info;
    info.length = whole.size();
    REQUIRE(writer->begin(info, &to).ok());
    for (std::uint64_t at = 0; at < whole.size(); at += part) {
        writer->put(ByteView(whole).subspan(at, part), at == 0 ? Into::Caches : Into::Memory);
        for (const auto from : {std::uint64_t{0}, at}) {
            const auto held = writer->hold(1, from, part);
            EXPECT(held.by != nullptr);
            EXPECT_EQ(held.sum.value_or(1), from == at ? crc32c(whole.data() + at, part) : 1);
        }
    }
    REQUIRE(writer->commit().ok());
    EXPECT_EQ(writer->last_record().crc, crc32c(whole.data(), whole.size()));
    const auto held = writer->hold(1, part, part);
    EXPECT(held.by != nullptr && held.sum == crc32c(whole.data() + part, part));
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
