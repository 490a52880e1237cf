#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
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
    Cells another(s);
    s.header().used.store(s.size());
    EXPECT(another.compare_and_set("a", bytes("two"), bytes("three"), &now) == Cells::Result::Lost);
    EXPECT(cells.compare_and_set("new", {}, bytes("x"), &now) == Cells::Result::Lost);
    EXPECT(another.read("a", &now) == Cells::Result::Value && now == bytes("two"));
}

FT_TEST(shm_cells_do_not_grow_with_decisions) {
    Segment s;
    REQUIRE(s.create(1, 2, 4).ok());
    Cells one(s), two(s);
    Bytes content, now;
    std::uint64_t used = 0;
    for (int i = 0; i < 10000; ++i) {
        auto next = bytes(std::string(static_cast<std::size_t>(i % 700), 'x') + std::to_string(i));
        REQUIRE((i % 3 == 0 ? one : two).compare_and_set("a", content, next, &now) == Cells::Result::Swapped);
        content = next;
        if (i == 1000) used = s.header().used.load();
    }
    EXPECT(one.read("a", &now) == Cells::Result::Value && now == content);
    EXPECT_EQ(s.header().used.load(), used);
}

// Records are written again and again while others read them: nobody may see a mixture, or win with an old expectation.
FT_TEST(shm_cells_are_whole_under_rewriting) {
    Segment s;
    REQUIRE(s.create(1, 2, 4).ok());
#ifdef __SANITIZE_THREAD__
    constexpr std::uint64_t kRounds = 200;  // each word of a copy is looked at by it: 1000 take more than a minute
#else
    constexpr std::uint64_t kRounds = 1000;
#endif
    constexpr std::uint64_t kThreads = 4;
    // Large, so that a thread is likely to lose its core in the middle of a copy.
    auto content = [](std::uint64_t n) {
        Bytes b(n == 0 ? 0 : (100u << 10) + n % 7 * 1000, static_cast<std::byte>(n));
        if (n > 0) std::memcpy(b.data(), &n, sizeof n);
        return b;
    };
    auto number = [&](const Bytes& b) {
        std::uint64_t n = 0;
        if (b.size() >= sizeof n) std::memcpy(&n, b.data(), sizeof n);
        return n;
    };
    std::atomic<int> torn{0};
    std::atomic<std::uint64_t> swapped{0};
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < kThreads; ++t)
        threads.emplace_back([&] {
            Cells cells(s);
            for (std::uint64_t seen = 0; seen < kRounds;) {
                Bytes now;
                const auto result = cells.compare_and_set("a", content(seen), content(seen + 1), &now);
                const auto n = number(now);
                if (result == Cells::Result::Lost || n > kRounds + kThreads || now != content(n)) ++torn;
                if (result == Cells::Result::Swapped) ++swapped;
                if (torn > 0) return;
                seen = n;
            }
        });
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(torn.load(), 0);
    EXPECT(swapped.load() >= kRounds);
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
