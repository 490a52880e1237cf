#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit.h"
#include "transport/shm/cells.h"

namespace ftcomm::shm {
namespace {

Bytes bytes(const std::string& s) {
    auto v = std::as_bytes(std::span(s.data(), s.size()));
    return {v.begin(), v.end()};
}

}  // namespace

FT_TEST(shm_segment_is_opened_only_by_its_job) {
    Segment made;
    REQUIRE(made.create(1, 2, 4).ok());
    auto open = [&](std::uint64_t job, std::uint64_t boot, int world) {
        Segment other;
        return other.open(::dup(made.fd()), job, boot, world).ok();
    };
    EXPECT(open(1, 2, 4));
    EXPECT(!open(3, 2, 4));
    EXPECT(!open(1, 3, 4));
    EXPECT(!open(1, 2, 5));
    Segment none;
    EXPECT(!none.open(::open("/dev/null", O_RDWR | O_CLOEXEC), 1, 2, 4).ok());
    EXPECT(::ftruncate(made.fd(), 4096) != 0);  // sealed: nobody can turn the others' accesses into SIGBUS
}

FT_TEST(shm_segment_refuses_offsets_outside) {
    Segment s;
    REQUIRE(s.create(1, 2, 4).ok());
    EXPECT(s.at<Ring>(0) == nullptr);
    EXPECT(s.at<Ring>(kArenaAt - 128) == nullptr);
    EXPECT(s.at<Ring>(kArenaAt + 8) == nullptr);  // not aligned
    EXPECT(s.at<Ring>(kArenaAt) != nullptr);
    EXPECT(s.at<Ring>(s.size() - 128) == nullptr);
    EXPECT(s.at<Ring>(kArenaAt, s.size()) == nullptr);
    EXPECT(s.at<Ring>(~std::uint64_t{127}) == nullptr);
    EXPECT_EQ(s.allocate(s.size(), 64), Offset{0});
    s.header().used.store(~std::uint64_t{0} - 10);  // overwritten by somebody: full, not wrapped around
    EXPECT_EQ(s.allocate(64, 64), Offset{0});
}

FT_TEST(shm_segment_finds_incarnations) {
    Segment s;
    REQUIRE(s.create(1, 2, 4).ok());
    EXPECT(s.newest_instance(3) == nullptr);
    auto* first = s.make_instance(3, 0);
    auto* third = s.make_instance(3, 2);
    EXPECT(s.register_instance(first));
    EXPECT(!s.register_instance(s.make_instance(3, 0)));
    EXPECT(s.register_instance(third));
    EXPECT(!s.register_instance(s.make_instance(3, 1)));  // came too late
    EXPECT(s.newest_instance(3) == third);
    EXPECT(s.find_instance(3, 0) == first);
    EXPECT(s.find_instance(3, 1) == nullptr);
    EXPECT(s.find_instance(2, 0) == nullptr);
}

FT_TEST(shm_cells_compare_content) {
    Segment s;
    REQUIRE(s.create(1, 2, 4).ok());
    Cells cells(s);
    Bytes now;
    EXPECT(cells.read("a", &now) == Cells::Result::Value && now.empty());
    EXPECT(cells.compare_and_set("a", bytes("x"), bytes("y"), &now) == Cells::Result::Conflict && now.empty());
    EXPECT(cells.compare_and_set("a", {}, bytes("one"), &now) == Cells::Result::Swapped && now == bytes("one"));
    EXPECT(cells.compare_and_set("a", {}, bytes("two"), &now) == Cells::Result::Conflict && now == bytes("one"));
    EXPECT(cells.compare_and_set("a", bytes("one"), bytes("two"), &now) == Cells::Result::Swapped);
    EXPECT(cells.compare_and_set("a", bytes("one"), bytes("three"), &now) == Cells::Result::Conflict && now == bytes("two"));
    EXPECT(cells.read("b", &now) == Cells::Result::Value && now.empty());
    EXPECT(cells.read("a", &now) == Cells::Result::Value && now == bytes("two"));
    // A full segment loses no decision.
    s.header().used.store(s.size());
    EXPECT(cells.compare_and_set("a", bytes("two"), bytes("three"), &now) == Cells::Result::Lost);
    EXPECT(cells.compare_and_set("new", {}, bytes("x"), &now) == Cells::Result::Lost);
    EXPECT(cells.read("a", &now) == Cells::Result::Value && now == bytes("two"));
}

FT_TEST(shm_cells_one_winner_each_time) {
    Segment s;
    REQUIRE(s.create(1, 2, 4).ok());
    constexpr int kThreads = 4, kRounds = 2000;
    std::atomic<int> swapped{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&] {
            Cells cells(s);
            for (int i = 0; i < kRounds; ++i) {
                auto key = "key" + std::to_string(i);
                Bytes now;
                if (cells.compare_and_set(key, {}, bytes("v"), &now) == Cells::Result::Swapped) ++swapped;
            }
        });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(swapped.load(), kRounds);
}

}  // namespace ftcomm::shm
