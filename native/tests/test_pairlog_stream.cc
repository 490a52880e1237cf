#include <cstring>

#include "tests/pairlog_rig.h"

namespace ftcomm::pairlog {

FT_TEST(pairlog_appends_and_finds) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), 0u);
    EXPECT_EQ(writer->first_seq(), 1u);
    RecordInfo in{RecordKind::Answer, 77, -9, 0x123456789abcdef0, 41, 7, 99, 5};
    const Bytes payload = content(1, 1000);
    REQUIRE(writer->append(in, payload).ok());
    EXPECT_EQ(writer->last_record().seq, 1u);
    RecordInfo out;
    ByteView got;
    REQUIRE(writer->find(1, &out, &got).ok());
    EXPECT(out.kind == RecordKind::Answer);
    EXPECT_EQ(out.seq, 1u);
    EXPECT_EQ(out.tag, -9);
    EXPECT_EQ(out.aux, 0x123456789abcdef0u);
    EXPECT_EQ(out.step, 41u);
    EXPECT_EQ(out.micro_batch, 7u);
    EXPECT_EQ(out.length, 1000u);
    EXPECT_EQ(out.crc, writer->last_record().crc);
    EXPECT(same(got, payload));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(got.data()) % 64, 0u);
    // Nothing, one byte, just fitting, one more, several segments' worth.
    for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{kSmall - kPage}, std::size_t{kSmall - kPage + 1},
                                     std::size_t{5 * kSmall + 17}, std::size_t{64}})
        REQUIRE(writer->append({.length = 0}, content(writer->last_seq() + 1, length)).ok());
    EXPECT_EQ(writer->last_seq(), 7u);
    REQUIRE(writer->find(5, &out, &got).ok());
    EXPECT(same(got, content(5, kSmall - kPage + 1)));
    REQUIRE(writer->find(6, &out, &got).ok());
    EXPECT(same(got, content(6, 5 * kSmall + 17)));
    EXPECT_EQ(writer->find(8, &out, &got).code, Code::Invalid);
    EXPECT_EQ(writer->find(0, &out, &got).code, Code::Invalid);
}

FT_TEST(pairlog_puts_parts_past_the_cache) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    std::uint64_t seq = 0;
    for (std::size_t length : {0u, 1u, 63u, 64u, 65u, 4096u, 40001u, 200003u}) {
        const auto whole = content(++seq, length);
        RecordInfo info;
        info.length = length;
        std::byte* to = nullptr;
        REQUIRE(writer->begin(info, &to).ok());
        const auto cut = length / 3;
        writer->put(ByteView(whole).first(cut), Into::Memory);
        writer->put(ByteView(whole).subspan(cut, length / 2 - cut));
        writer->put(ByteView(whole).subspan(length / 2), Into::Memory);
        REQUIRE(writer->commit().ok());
        ByteView view;
        REQUIRE(writer->find(seq, &info, &view).ok());  // with its checksum
        EXPECT(same(view, whole));
    }
}

FT_TEST(pairlog_goes_on_after_reopening) {
    Folder folder;
    for (int round = 0; round < 5; ++round) {
        auto dir = open_log(folder.config());
        auto writer = open_writer(*dir);
        EXPECT_EQ(writer->last_seq(), static_cast<std::uint64_t>(round) * 40);
        EXPECT(holds_all(*writer));
        for (int i = 0; i < 40; ++i) REQUIRE(add(*writer, static_cast<std::size_t>(i * i * 10)).ok());
    }
}

FT_TEST(pairlog_has_one_writer) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    std::unique_ptr<StreamWriter> second;
    auto status = StreamWriter::open(*dir, kKey, &second);
    EXPECT_EQ(status.code, Code::System);
    EXPECT(contains(status.message, "3->5 of communicator ab is being written by process " + std::to_string(getpid())));
    // Another process is refused by the kernel's lock, and told who has it.
    const auto parent = std::to_string(getpid());
    EXPECT_EQ(WEXITSTATUS(child_with("",
                                     [&] {
                                         auto other = open_log(folder.config());
                                         std::unique_ptr<StreamWriter> theirs;
                                         auto refused = StreamWriter::open(*other, kKey, &theirs);
                                         _exit(refused.code == Code::System &&
                                                       refused.message.find("process " + parent + ",") != std::string::npos
                                                   ? 42
                                                   : 1);
                                     })),
              42);
    writer.reset();
    EXPECT(StreamWriter::open(*dir, kKey, &second).ok());
    auto other = open_writer(*dir, {0xab, 3, 6});  // another stream
    REQUIRE(add(*other, 10).ok());
    EXPECT_EQ(second->last_seq(), 0u);
}

FT_TEST(pairlog_abandoned_record_never_was) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Observer);
    REQUIRE(add(*writer, 100).ok());
    std::byte* at = nullptr;
    REQUIRE(writer->begin({.length = 5000}, &at).ok());
    std::memset(at, 1, 5000);
    writer->publish(4000);
    EXPECT(reader->refresh());
    RecordInfo info;
    ByteView bytes;
    std::uint64_t first = 0, second = 0;
    REQUIRE(reader->partial(&info, &bytes, &first));
    EXPECT_EQ(bytes.size(), 4000u);
    EXPECT_EQ(info.length, 5000u);
    writer->abandon();
    EXPECT(!reader->partial(&info, &bytes, &second));
    EXPECT(reader->generation() != first);
    REQUIRE(writer->begin({.length = 60}, &at).ok());
    REQUIRE(reader->partial(&info, &bytes, &second));
    EXPECT(second != first);
    EXPECT_EQ(info.length, 60u);
    EXPECT_EQ(bytes.size(), 0u);
    std::memset(at, 2, 60);
    REQUIRE(writer->commit().ok());
    EXPECT(reader->refresh());
    EXPECT(!reader->partial(&info, &bytes, &second));
    EXPECT_EQ(reader->last_seq(), 2u);
    REQUIRE(reader->find(2, &info, &bytes).ok());
    EXPECT_EQ(bytes.size(), 60u);
}

FT_TEST(pairlog_writer_is_dropped_with_an_open_record) {
    Folder folder;
    auto dir = open_log(folder.config());
    {
        auto writer = open_writer(*dir);
        std::byte* at = nullptr;
        REQUIRE(add(*writer, 10).ok());
        REQUIRE(writer->begin({.length = 10}, &at).ok());
    }
    auto writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), 1u);
    EXPECT(holds(*writer, 1));
}

FT_TEST(pairlog_collects_whole_segments_and_recycles_them) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    while (dir->resident() < 8 * kSmall) REQUIRE(add(*writer, 10000).ok());
    const auto last = writer->last_seq();
    REQUIRE(writer->collect(last - 2).ok());
    EXPECT_EQ(writer->first_seq(), last - 1);
    EXPECT(dir->free_bytes() >= 6 * kSmall);
    EXPECT(holds_all(*writer));
    RecordInfo info;
    ByteView bytes;
    EXPECT_EQ(writer->find(last - 2, &info, &bytes).code, Code::Invalid);
    for (int i = 0; i < 200; ++i) {
        REQUIRE(add(*writer, 10000).ok());
        REQUIRE(writer->collect(writer->last_seq() - 3).ok());
    }
    EXPECT(dir->resident() <= 8 * kSmall);  // always the same memory
    EXPECT(holds_all(*writer));
    REQUIRE(writer->collect(~std::uint64_t{0}).ok());
    EXPECT_EQ(writer->first_seq(), writer->last_seq() + 1);
    EXPECT_EQ(dir->resident(), dir->free_bytes());
    const auto all = writer->last_seq();
    writer.reset();
    writer = open_writer(*dir);  // no segment is left: the numbers go on
    EXPECT_EQ(writer->last_seq(), all);
    REQUIRE(add(*writer, 10).ok());
    EXPECT_EQ(writer->last_seq(), all + 1);
    EXPECT(holds_all(*writer));
}

FT_TEST(pairlog_segment_sizes) {
    EXPECT_EQ(segment_size_for(0, kSmall), kSmall);
    EXPECT_EQ(segment_size_for(kSmall - kPage, kSmall), kSmall);
    EXPECT_EQ(segment_size_for(64u << 20, 8u << 20), (64u << 20) + kPage);
    EXPECT_EQ(segment_size_for((64u << 20) + 1, 8u << 20), (80u << 20) + kPage);
    for (std::uint64_t length = kSmall; length < 100 * kSmall; length += 777) {
        const auto size = segment_size_for(length, kSmall);
        EXPECT(size >= length + kPage && size <= length + length / 4 + 2 * kPage && size % kPage == 0);
    }
}

}  // namespace ftcomm::pairlog
