// The pair log in files, as the protocol sees it.
#include "runtime/file_log.h"

#include <fstream>

#include "tests/pairlog_rig.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

std::unique_ptr<FileLog> open_as(const pairlog::Folder& folder, int slot, bool again = false) {
    FileLogConfig c;
    c.files = folder.config();
    c.files.path = folder.path + "/job/log";
    c.slot = slot;
    c.again = again;
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

}  // namespace ftcomm
