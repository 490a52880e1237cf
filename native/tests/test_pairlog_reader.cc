#include <atomic>
#include <cstring>
#include <thread>

#include "tests/pairlog_rig.h"

namespace ftcomm::pairlog {
namespace {

void wait_for(const std::atomic<std::uint64_t>& value, std::uint64_t least) {
    for (int i = 0; i < 5000 && value < least; ++i) usleep(1000);
}

}  // namespace

FT_TEST(pairlog_reader_comes_before_the_writer) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto reader = open_reader(*dir, Role::Consumer);
    EXPECT(!reader->refresh());
    EXPECT_EQ(reader->last_seq(), 0u);
    RecordInfo info;
    ByteView bytes;
    std::uint64_t generation = 0;
    EXPECT(!reader->partial(&info, &bytes, &generation));
    auto writer = open_writer(*dir);
    REQUIRE(add(*writer, 3 * kSmall).ok());
    REQUIRE(add(*writer, 10).ok());
    EXPECT(reader->refresh());
    EXPECT(!reader->refresh());
    EXPECT_EQ(reader->last_seq(), 2u);
    EXPECT(holds_all(*reader));
}

FT_TEST(pairlog_nothing_is_recycled_before_the_consumer_has_acknowledged) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Consumer);
    for (int i = 0; i < 30; ++i) REQUIRE(add(*writer, 20000).ok());
    REQUIRE(reader->refresh());
    RecordInfo info;
    ByteView view;
    REQUIRE(reader->find(4, &info, &view).ok());
    reader->acknowledge(3);
    REQUIRE(writer->collect(30).ok());
    EXPECT_EQ(writer->first_seq(), 4u);
    for (int i = 0; i < 30; ++i) REQUIRE(add(*writer, 20000).ok());  // into whatever was recycled
    EXPECT(same(view, content(4, 20000)));
    EXPECT(reader->intact(4));
    EXPECT(!reader->intact(3));
    REQUIRE(reader->refresh());
    EXPECT_EQ(reader->first_seq(), 4u);
    EXPECT(holds_all(*reader));
    reader->acknowledge(60);
    for (int i = 0; i < 4; ++i) REQUIRE(add(*writer, 20000).ok());  // the rest of the collect comes with the next segment
    EXPECT_EQ(writer->first_seq(), 31u);
    reader.reset();
    reader = open_reader(*dir, Role::Consumer);  // a successor
    EXPECT_EQ(reader->acknowledged(), 60u);
    EXPECT(holds_all(*reader));
}

FT_TEST(pairlog_an_observer_is_told_that_it_was_late) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    auto reader = open_reader(*dir, Role::Observer);
    for (int i = 0; i < 10; ++i) REQUIRE(add(*writer, 20000).ok());
    REQUIRE(reader->refresh());
    RecordInfo info;
    ByteView view;
    REQUIRE(reader->find(2, &info, &view).ok());
    REQUIRE(writer->collect(9).ok());
    for (int i = 0; i < 20; ++i) REQUIRE(add(*writer, 20001).ok());
    EXPECT(!reader->intact(2));
    EXPECT_EQ(reader->find(2, &info, &view).code, Code::Invalid);
    REQUIRE(reader->refresh());
    EXPECT(holds_all(*reader));
}

// Who comes to a living log looks from its oldest segment on, which may be another stream's before it is mapped.
FT_TEST(pairlog_a_segment_that_is_recycled_while_it_is_opened_is_gone) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    for (int i = 0; i < 70; ++i) REQUIRE(add(*writer, 40000).ok());  // one in each segment
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> looked{0}, damaged{0};
    std::thread other([&] {
        auto theirs = open_log(folder.config());
        while (!stop) {
            // A new one each time: it has mapped nothing yet.
            auto reader = open_reader(*theirs, Role::Observer);
            RecordInfo info;
            ByteView view;
            damaged += reader->find(reader->last_seq(), &info, &view, false).code == Code::LogCorrupt;
            ++looked;
        }
    });
    bool ok = true;
    for (int i = 0; ok && (i < 20'000 || looked < 2'000) && i < 2'000'000; ++i) {
        const Bytes payload(40000);
        ok = writer->append({}, payload).ok() && writer->collect(writer->last_seq() - 60).ok();
    }
    stop = true;
    other.join();
    EXPECT(ok);
    EXPECT_EQ(damaged.load(), 0u);
}

// Also where there are many between two checkpoints, and whichever stream has them next: to map one costs more than to copy it.
FT_TEST(pairlog_a_reader_keeps_what_it_has_mapped) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto theirs = open_log(folder.config());
    const StreamKey other{kKey.comm, kKey.src, kKey.dst + 1};
    for (const auto& key : {kKey, other, kKey}) {
        auto writer = open_writer(*dir, key);
        auto reader = open_reader(*theirs, Role::Consumer, key);
        for (int i = 0; i < 300; ++i) REQUIRE(add(*writer, 40000).ok());  // one in each
        (void)reader->refresh();
        EXPECT(holds_all(*reader));
        EXPECT_EQ(theirs->idle().size(), 0u);  // all that were are in use again
        reader->acknowledge(reader->last_seq());
        REQUIRE(writer->collect(writer->last_seq()).ok());
        (void)reader->refresh();
        EXPECT_EQ(theirs->idle().size(), 300u);
    }
}

FT_TEST(pairlog_idle_mappings_are_bounded) {
    IdleMappings idle;
    for (std::uint64_t i = 1; i <= IdleMappings::kMost + 7; ++i) {
        auto mapping = std::make_shared<Mapping>();
        mapping->inode = i;
        idle.put(std::move(mapping));
        if (auto used = idle.take(0, 8); used != nullptr) idle.put(std::move(used));
    }
    EXPECT_EQ(idle.size(), IdleMappings::kMost);
    EXPECT(idle.take(0, 7) == nullptr);  // the oldest went first
    EXPECT(idle.take(0, 8) != nullptr);  // it was used since
    EXPECT(idle.take(1, 9) == nullptr);
    EXPECT(idle.take(0, 9) != nullptr);
}

FT_TEST(pairlog_partial_bytes_are_final) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    constexpr std::size_t kLength = 1u << 20;
    constexpr std::uint64_t kRecords = 60;
    std::atomic<std::uint64_t> attached{0}, partials{0}, bad{0};
    // Copies each record while it is written and compares with what was committed in the end.
    std::thread other([&] {
        auto theirs = open_log(folder.config());
        auto reader = open_reader(*theirs, Role::Consumer);
        attached = 1;  // from here on nothing is collected that it has not seen
        RecordInfo info;
        ByteView view;
        Bytes copy(kLength);
        for (std::uint64_t next = 1; next <= kRecords;) {
            std::uint64_t have = 0, generation = 0, began = 0;
            while (reader->refresh(), reader->last_seq() < next) {
                if (!reader->partial(&info, &view, &generation)) continue;
                if (generation != began) have = 0;
                began = generation;
                if (info.seq != next || info.length != kLength) ++bad;
                std::memcpy(copy.data() + have, view.data() + have, view.size() - have);
                partials += view.size() > have;
                have = view.size();
            }
            if (!reader->find(next, &info, &view)) ++bad;
            if (have > 0 && reader->generation() == began && !same(ByteView(copy).first(have), view.first(have))) ++bad;
            if (!same(view, content(next, kLength))) ++bad;
            reader->acknowledge(next++);
        }
    });
    wait_for(attached, 1);
    for (std::uint64_t i = 0; i < kRecords; ++i) {
        const Bytes payload = content(writer->last_seq() + 1, kLength);
        std::byte* at = nullptr;
        if (i % 3 == 0) {  // begun, given up, begun anew
            REQUIRE(writer->begin({.length = kLength}, &at).ok());
            std::memset(at, 0x55, kLength / 2);
            writer->publish(kLength / 2);
            writer->abandon();
        }
        REQUIRE(writer->begin({.length = kLength}, &at).ok());
        for (std::size_t done = 0; done < kLength;) {
            std::memcpy(at + done, payload.data() + done, 16384);
            writer->publish(done += 16384);
            if (done == kLength / 2 && i % 4 == 1) wait_for(partials, i / 4 + 1);  // on a busy machine it may never look
        }
        REQUIRE(writer->commit().ok());
        REQUIRE(writer->collect(writer->last_seq()).ok());
    }
    other.join();
    EXPECT_EQ(bad.load(), 0u);
    EXPECT(partials.load() >= kRecords / 4);
}

// A reader has copied a part of a record when its writer is killed: the successor's may be another one.
FT_TEST(pairlog_generation_changes_with_the_writer) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto reader = open_reader(*dir, Role::Consumer);
    EXPECT(killed(child_with("rank=0,at=log.payload.after:2,do=kill", [&] {
        auto theirs = open_log(folder.config());
        auto victim = open_writer(*theirs);
        for (int i = 0; i < 2; ++i) (void)add(*victim, 5000);
    })));
    EXPECT(reader->refresh());
    RecordInfo info;
    ByteView view;
    std::uint64_t before = 0, after = 0;
    REQUIRE(reader->partial(&info, &view, &before));
    EXPECT_EQ(info.seq, 2u);
    EXPECT(same(view, content(2, 5000)));
    auto writer = open_writer(*dir);
    EXPECT_EQ(writer->last_seq(), 1u);
    EXPECT(!reader->partial(&info, &view, &after));
    EXPECT(reader->generation() != before);
    std::byte* at = nullptr;
    REQUIRE(writer->begin({.length = 5000}, &at).ok());
    std::memset(at, 9, 5000);
    writer->publish(100);
    EXPECT(reader->refresh());
    REQUIRE(reader->partial(&info, &view, &after));
    EXPECT(after != before);
    EXPECT_EQ(view.size(), 100u);
    EXPECT(view[99] == std::byte{9});
    REQUIRE(writer->commit().ok());
}

// A record that is looked at where it lies is given up; the next one there, which is not opened, is cut off before its header.
FT_TEST(pairlog_what_was_given_up_goes_before_what_it_had) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto reader = open_reader(*dir, Role::Observer);
    RecordInfo info;
    ByteView view;
    std::uint64_t generation = 0;
    {
        auto writer = open_writer(*dir);
        std::byte* at = nullptr;
        REQUIRE(writer->begin({.aux = 7, .length = 5000}, &at).ok());
        std::memset(at, 1, 5000);
        writer->publish(5000);
        reader->refresh();
        REQUIRE(reader->partial(&info, &view, &generation));
    }
    EXPECT(reader->generation() != generation);
    EXPECT(reader->is_at(info, view));
    EXPECT(killed(child_with("rank=0,at=log.header.before:1,do=kill", [&] {
        auto theirs = open_log(folder.config());
        auto writer = open_writer(*theirs);
        const Bytes bytes(100, std::byte{9});
        const ByteView parts[] = {bytes};
        (void)writer->append_whole({.aux = 8, .length = 100}, parts);
    })));
    EXPECT(view.front() == std::byte{9});
    EXPECT(!reader->is_at(info, view));
}

// Published is what is there: the payload's bytes must be visible before the watermark says so.
FT_TEST(pairlog_watermark_comes_after_the_bytes) {
    Folder folder;
    auto dir = open_log(folder.config());
    auto writer = open_writer(*dir);
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> seen{0}, bad{0};
    std::thread other([&] {
        auto theirs = open_log(folder.config());
        auto reader = open_reader(*theirs, Role::Consumer);
        RecordInfo info;
        ByteView view;
        std::uint64_t generation = 0;
        while (!stop) {
            reader->refresh();
            if (reader->partial(&info, &view, &generation) && !view.empty()) {
                ++seen;
                // Bytes say the number of the record; recycled memory has other numbers.
                const auto want = static_cast<std::byte>(info.seq % 251 + 1);
                const bool first = view.front() == want, last = view.back() == want;
                // Only afterwards: a record that was given up, or recycled, counts for nothing.
                if (reader->generation() == generation && reader->intact(info.seq) && (!first || !last)) ++bad;
            }
            if (reader->last_seq() > 0) reader->acknowledge(reader->last_seq());
        }
    });
    Bytes payload(4 * kSmall);  // two chunks of append
    for (int i = 0; i < 500 || (seen < 100 && i < 100'000); ++i) {  // the reader gets its share of a busy machine
        std::memset(payload.data(), static_cast<int>((writer->last_seq() + 1) % 251 + 1), payload.size());
        REQUIRE(writer->append({}, payload).ok());
        REQUIRE(writer->collect(writer->last_seq()).ok());
    }
    stop = true;
    other.join();
    EXPECT_EQ(bad.load(), 0u);
    EXPECT(seen.load() >= 100);
}

}  // namespace ftcomm::pairlog
