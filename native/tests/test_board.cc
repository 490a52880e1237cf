// Boards by themselves: several ranks' lines, read while they are written.
#include "collectives/board.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

// Of one process, in which a place is an address.
class Memory final : public Transport {
public:
    std::byte* reserve(int, std::uint32_t) override { return nullptr; }
    void commit(int, const FrameHeader&) override {}
    void attach(int, std::uint32_t) override {}
    void detach(int) override {}
    std::uint32_t max_payload() const override { return 0; }
    Window make_window(std::size_t bytes) override {
        if (room_-- <= 0) return {};
        auto& memory = windows_.emplace_back(bytes);
        return {memory.data(), reinterpret_cast<std::uintptr_t>(memory.data())};
    }
    const std::byte* look(int, std::uint64_t place, std::size_t) override {
        return reinterpret_cast<const std::byte*>(place);  // NOLINT
    }
    int room_ = 1000;

private:
    std::deque<Bytes> windows_;
};

Board::Entry entry(std::uint64_t ticket) {
    return {ticket + 1, ticket + 2, ticket + 3, static_cast<std::uint32_t>(ticket), 0, ticket + 4, ticket};
}

}  // namespace

FT_TEST(board_shows_what_was_posted_last) {
    Memory memory;
    std::vector<Transport::Window> spare;
    Board mine, theirs;
    REQUIRE(mine.open(memory, spare) && theirs.open(memory, spare));
    EXPECT(!mine.knows(3) && !mine.look(3));
    EXPECT(mine.learn(memory, 3, 0, theirs.place()) && mine.knows(3));
    EXPECT(!mine.look(3));  // nothing yet
    theirs.post(entry(7));
    theirs.advance(2);
    const auto seen = mine.look(3);
    REQUIRE(seen.has_value());
    EXPECT(seen->comm == 8 && seen->seq == 9 && seen->signature == 10 && seen->attempt == 7 && seen->window == 11);
    EXPECT(seen->ticket == 7 && seen->through == 2);
    theirs.post(entry(9));
    EXPECT(mine.look(3)->through == 0 && mine.look(3)->seq == 11);
    theirs.forget();
    EXPECT(!mine.look(3));
    mine.set_all_known();
    mine.forget();
    EXPECT(!mine.knows(3) && !mine.all_known());
    const auto place = theirs.place();
    theirs.give_back();
    EXPECT_EQ(spare.size(), std::size_t{1});
    memory.room_ = 0;
    EXPECT(theirs.open(memory, spare) && theirs.place() == place);
    Board none;
    EXPECT(!none.open(memory, spare));
}

// What the runs rest on: each posts, and then looks; of those who come to a step at once somebody sees all of them there. And an entry is seen
// as a whole.
FT_TEST(of_those_who_post_and_look_the_last_one_sees_all) {
    constexpr int kRanks = 4;
    constexpr std::uint32_t kSteps = 400, kEach = 4;  // of an entry
    Memory memory;
    std::vector<Transport::Window> spare;
    std::deque<Board> boards(kRanks);
    for (auto& board : boards) REQUIRE(board.open(memory, spare));
    for (auto& board : boards)
        for (int r = 0; r < kRanks; ++r) EXPECT(board.learn(memory, r, r, boards[static_cast<std::size_t>(r)].place()));
    std::mutex mutex;
    std::condition_variable told;
    std::uint32_t all = 0;  // are through so many steps, says somebody who has seen it
    std::atomic<int> torn{0};
    const auto run = [&](int rank) {
        auto& board = boards[static_cast<std::size_t>(rank)];
        for (std::uint32_t step = 1; step <= kSteps; ++step) {
            const auto nth = 1 + (step - 1) / kEach;
            if ((step - 1) % kEach == 0) board.post(entry(nth));
            else board.advance((step - 1) % kEach);
            bool sees = true;
            for (int r = 0; r < kRanks; ++r) {
                const auto e = board.look(r);
                if (e) torn += e->comm != e->ticket + 1 || e->signature != e->ticket + 3 || e->window != e->ticket + 4;
                sees &= e && (e->ticket - 1) * kEach + e->through + 1 >= step;
            }
            std::unique_lock lock(mutex);
            if (sees && all < step) {
                all = step;
                told.notify_all();
            }
            told.wait(lock, [&] { return all >= step; });  // for ever, if nobody has seen it
        }
    };
    std::vector<std::thread> threads;
    for (int r = 0; r < kRanks; ++r) threads.emplace_back(run, r);
    for (auto& t : threads) t.join();
    EXPECT_EQ(torn.load(), 0);
    EXPECT_EQ(all, kSteps);
}

}  // namespace ftcomm::unit
