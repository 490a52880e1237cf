// The pair log in files, as the protocol sees it.
#include "runtime/file_log.h"

#include <algorithm>
#include <fstream>

#include "channel/late_log.h"
#include "tests/pairlog_rig.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

std::unique_ptr<FileLog> open_as(const pairlog::Folder& folder, int slot, bool again = false, bool unlogged = false) {
    FileLogConfig c;
    c.files = folder.config();
    c.files.path = folder.path + "/job/log";
    c.slot = slot;
    c.again = again;
    c.unlogged = unlogged;
    c.hosts = std::vector<std::uint64_t>(8, 1);
    std::unique_ptr<FileLog> log;
    const auto s = FileLog::open(c, &log);
    EXPECT(s.ok());
    return log;
}

}  // namespace

// A stream that is there and cannot be used looks empty to last(): state() says why it is not.
FT_TEST(file_log_says_which_stream_cannot_be_used) {
    const LogKey results{7, 2, kResults}, messages{7, 2, 1}, none{7, 2, 3};
    const Bytes text(8);
    const ByteView parts[] = {text};
    for (const auto& key : {results, messages}) {
        pairlog::Folder folder;
        {
            auto log = open_as(folder, 2);
            REQUIRE(log != nullptr);
            EXPECT(log->append(key, 1, 2, parts).ok());
            EXPECT(log->state(key).ok() && log->state(none).ok());
        }
        for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path)) {
            if (entry.path().filename() != "index") continue;
            std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
            file.seekp(8);
            file.put(99);  // the version
        }
        for (int slot : key == messages ? std::vector<int>{2, 1} : std::vector<int>{2}) {
            auto log = open_as(folder, slot);
            REQUIRE(log != nullptr);
            EXPECT_EQ(log->last(key), 0u);
            EXPECT(!log->state(key).ok());
            if (slot == 1) EXPECT(log->state({7, 3, 1}).ok());
        }
    }
}

// Nor is one that cannot be looked for taken for one that is not there.
FT_TEST(file_log_says_which_stream_cannot_be_looked_for) {
    const LogKey key{7, 2, kHeard};
    pairlog::Folder folder;
    auto log = open_as(folder, 2);
    REQUIRE(log != nullptr);
    const auto stream = folder.path + "/job/log/" + pairlog::name_of({7, 2, 12});
    std::filesystem::create_symlink(stream, stream);
    EXPECT_EQ(log->last(key), 0u);
    EXPECT_EQ(log->state(key).code, Code::System);
    std::filesystem::remove(stream);
    EXPECT(log->state(key).ok());
}

// A replacement finds its predecessor's mark. Where there is none, that stays known: its own replacement finds a mark, and not the log.
FT_TEST(file_log_knows_that_its_predecessor_was_elsewhere) {
    pairlog::Folder here, there;
    EXPECT(!open_as(here, 2)->lost());
    EXPECT(!open_as(here, 2, true)->lost());
    EXPECT(!open_as(here, 1)->lost());
    EXPECT(open_as(there, 2, true)->lost());
    EXPECT(open_as(there, 2, true)->lost());
    EXPECT(!open_as(there, 1)->lost());
    // After the host's end: the mark was not written back, streams were.
    EXPECT(open_as(here, 2, true)->append({7, 2, 1}, 1, 2, {}).ok());
    std::filesystem::remove(here.path + "/job/log/rank-2");
    EXPECT(!open_as(here, 2, true)->lost());
}

// With durability "host": what is late is synced once for each stream, however many records wait, and a send is done after that.
// All may have ended before they had a log: then nothing is lost. Where something is logged, that is not believed.
FT_TEST(file_log_of_a_job_that_had_none_is_not_lost) {
    pairlog::Folder folder;
    for (int slot : {1, 2}) EXPECT(!open_as(folder, slot, true, true)->lost());
    EXPECT(!open_as(folder, 1, true)->lost());
    EXPECT(open_as(folder, 1, true)->append({7, 1, 2}, 1, 2, {}).ok());
    EXPECT(!open_as(folder, 2, true, true)->lost());
    EXPECT(open_as(folder, 3, true, true)->lost());
    EXPECT(open_as(folder, 3, true, true)->lost());
}

FT_TEST(file_log_syncs_what_is_late_together) {
    pairlog::Folder folder("/tmp");
    FileLogConfig c;
    c.files = folder.config();
    c.files.path = folder.path + "/job/log";
    c.files.durability = pairlog::LogConfig::Durability::Host;
    c.hosts = {1, 2, 3, 4, 5, 6, 7, 8};  // each rank on its own
    std::unique_ptr<FileLog> log;
    REQUIRE(FileLog::open(c, &log).ok());
    LateLog late(log.get(), true);
    const Bytes text(1000);
    int released = 0;
    const auto post = [&](int dst) { EXPECT(late.append_held({7, 0, dst}, 1, 2, text, [&] { ++released; }).ok()); };
    for (int i = 0; i < 90; ++i) post(1 + i % 3);
    for (int i = 0; i < 90; ++i) late.work();
    EXPECT_EQ(late.records(), 0u);
    EXPECT_EQ(log->syncs(), 0u);
    EXPECT_EQ(released, 0);
    EXPECT(late.has_work());
    late.work();
    EXPECT_EQ(log->syncs(), 3u);
    EXPECT_EQ(released, 90);
    EXPECT(!late.has_work());
    for (int i = 0; i < 40; ++i) post(1);
    EXPECT(late.flush().ok());
    EXPECT_EQ(log->syncs(), 4u);
    EXPECT_EQ(released, 130);
    // What is acted on is synced at once.
    const ByteView parts[] = {text};
    for (int i = 0; i < 5; ++i) EXPECT(late.append({7, 0, kResults}, 1, 2, parts).ok());
    EXPECT_EQ(log->syncs(), 9u);
}

FT_TEST(file_log_record_that_is_made_in_place_is_there_whole_or_not_at_all) {
    pairlog::Folder folder;
    auto log = open_as(folder, 2);
    REQUIRE(log != nullptr);
    const LogKey key{7, 2, 1};
    constexpr std::uint64_t kBytes = 200'001;
    Bytes text(kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) text[i] = static_cast<std::byte>(i * i / 7);
    std::uint64_t next = 0;
    const auto fill = [&](std::byte* to, std::uint64_t at, std::uint64_t bytes, std::optional<std::uint32_t>* sum) -> Status {
        EXPECT(at == next && !*sum);
        next = at + bytes;
        std::copy_n(text.data() + at, bytes, to);
        if (at > 0) *sum = crc32c(text.data(), next);  // this maker knows it, now and then
        return {};
    };
    const auto fail = [&](std::byte* to, std::uint64_t at, std::uint64_t bytes, std::optional<std::uint32_t>* sum) {
        auto s = fill(to, at, bytes, sum);
        return at > 0 ? Status::error(Code::LogCorrupt, "no") : s;
    };
    EXPECT(log->append_made(key, 4, 0, kBytes, fail).code == Code::LogCorrupt);
    EXPECT_EQ(log->last(key), 0u);
    next = 0;
    EXPECT(log->append_made(key, 4, 0, kBytes, fill).ok());
    EXPECT(next == kBytes && log->append_made(key, 4, 0, 0, fill).ok());
    LogRecord record;
    REQUIRE(log->find(key, 1, &record).ok());
    EXPECT(record.tag == 4 && Bytes(record.payload.begin(), record.payload.end()) == text);
    EXPECT(log->find(key, 2, &record).ok() && record.payload.empty());
}

}  // namespace ftcomm
