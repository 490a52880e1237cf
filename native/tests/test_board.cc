// Boards by themselves: several ranks' lines, read while they are written.
#include "collectives/board.h"

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "tests/board_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

Board::Entry entry(std::uint64_t ticket) {
    return {ticket + 1, ticket + 2, ticket + 3, static_cast<std::uint32_t>(ticket),
            0,          ticket + 4, ticket,     {static_cast<std::uint32_t>(ticket + 5), 6}};
}

}  // namespace

FT_TEST(board_shows_what_was_posted_last) {
    OneProcess memory;
    std::vector<Transport::Window> spare;
    Board mine(spare), theirs(spare);
    REQUIRE(mine.open(memory) && theirs.open(memory));
    EXPECT(!mine.knows(3) && !mine.look(3));
    EXPECT(mine.learn(memory, 3, 0, theirs.place()) && mine.knows(3));
    EXPECT(!mine.look(3));  // nothing yet
    theirs.post(entry(7));
    theirs.advance(2);
    const auto seen = mine.look(3);
    REQUIRE(seen.has_value());
    EXPECT(seen->comm == 8 && seen->seq == 9 && seen->signature == 10 && seen->attempt == 7 && seen->window == 11 &&
           seen->sets.count == 12 && seen->sets.first == 6);
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
    EXPECT(theirs.open(memory) && theirs.place() == place);
    Board none(spare);
    EXPECT(!none.open(memory));
}

// What the runs rest on: each posts, and then looks; of two who come to a step at once one sees the other there.
FT_TEST(of_two_who_post_and_look_at_once_one_sees_the_other) {
    constexpr std::uint32_t kRounds = 60000, kEach = 3;  // of an entry: posted first, then advanced
    OneProcess memory;
    std::vector<Transport::Window> spare;
    std::array<Board, 2> boards{Board(spare), Board(spare)};
    for (auto& board : boards) REQUIRE(board.open(memory));
    for (int r : {0, 1})
        EXPECT(boards[static_cast<std::size_t>(1 - r)].learn(memory, r, r, boards[static_cast<std::size_t>(r)].place()));
    std::array<std::atomic<std::uint32_t>, 2> at{};
    std::array<std::vector<char>, 2> seen{std::vector<char>(kRounds), std::vector<char>(kRounds)};
    const auto run = [&](std::size_t rank) {
        auto& board = boards[rank];
        for (std::uint32_t round = 0; round < kRounds; ++round) {
            at[rank].store(round + 1);
            while (at[1 - rank].load() <= round) std::this_thread::yield();
            const auto ticket = 1 + round / kEach;
            if (round % kEach == 0) board.post(entry(ticket));
            else board.advance(round % kEach);
            const auto e = board.look(static_cast<int>(1 - rank));
            seen[rank][round] = e && (e->ticket - 1) * kEach + e->through >= round;
        }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    std::uint32_t lost = 0;
    for (std::uint32_t round = 0; round < kRounds; ++round) lost += seen[0][round] == 0 && seen[1][round] == 0;
    EXPECT_EQ(lost, 0u);
}

FT_TEST(entry_is_seen_as_a_whole_or_not_at_all) {
    OneProcess memory;
    std::vector<Transport::Window> spare;
    Board mine(spare), theirs(spare);
    REQUIRE(mine.open(memory) && theirs.open(memory) && mine.learn(memory, 1, 1, theirs.place()));
    std::atomic<bool> over{false};
    std::thread writer([&] {
        for (std::uint64_t ticket = 1; ticket <= 60000; ++ticket) theirs.post(entry(ticket));
        over = true;
    });
    int torn = 0;
    while (!over)
        if (const auto e = mine.look(1))
            torn += e->comm != e->ticket + 1 || e->seq != e->ticket + 2 || e->signature != e->ticket + 3 ||
                    e->attempt != e->ticket || e->window != e->ticket + 4 ||
                    e->sets.count != static_cast<std::uint32_t>(e->ticket + 5) || e->sets.first != 6;
    writer.join();
    EXPECT_EQ(torn, 0);
}

}  // namespace ftcomm::unit
