// Posts by themselves: read while they are written.
#include "collectives/posts.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "tests/board_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

struct Two {
    OneProcess memory;
    std::vector<Transport::Window> spare;
    std::array<Board, 2> boards{Board(spare), Board(spare)};
    SharedWriter writer{false};
    std::array<Posts, 2> posts{Posts(boards[0], writer), Posts(boards[1], writer)};
    Two() {
        for (auto& board : boards) REQUIRE(board.open(memory));
        for (int r : {0, 1}) REQUIRE(boards[r].learn(memory, 1 - r, 1 - r, boards[1 - r].place()));
    }
    std::array<Bytes, 2> rooms;
    Posts::Found look(int reader, const Posts::Key& key, ByteView* input) {
        return posts[reader].look(1 - reader, key, rooms[reader], input);
    }
};

Posts::Key key(std::uint64_t seq, std::uint64_t comm = 5) { return {comm, seq, 77, 3}; }
Bytes bytes_of(std::uint64_t seq) { return Bytes(seq * 37, static_cast<std::byte>(seq)); }

}  // namespace

FT_TEST(post_is_found_by_what_it_belongs_to) {
    Two two;
    ByteView found;
    EXPECT(two.look(0, key(1), &found) == Posts::Found::Nothing && !two.posts[1].last(5));
    two.posts[1].put(key(1), bytes_of(1));
    two.posts[1].put(key(2), bytes_of(2));
    for (std::uint64_t seq : {1, 2}) {
        REQUIRE(two.look(0, key(seq), &found) == Posts::Found::Input);
        EXPECT(std::ranges::equal(found, bytes_of(seq)));
    }
    auto other = key(2);
    other.attempt = 4;
    EXPECT(two.look(0, other, &found) == Posts::Found::Nothing);
    EXPECT(two.look(0, key(2, 6), &found) == Posts::Found::Nothing && two.look(0, key(4), &found) == Posts::Found::Nothing);
    other = key(2);
    other.signature = 78;
    EXPECT(two.look(0, other, &found) == Posts::Found::Other);
    two.posts[1].put(key(3), {});
    EXPECT(two.look(0, key(1), &found) == Posts::Found::Nothing);
    EXPECT(two.look(0, key(3), &found) == Posts::Found::Input && found.empty());
    EXPECT(two.look(1, key(3), &found) == Posts::Found::Nothing);
}

// Memory that another communicator has used goes on with its stamps, and holds nothing of this one.
FT_TEST(posts_of_another_communicator_in_the_same_memory) {
    Two two;
    ByteView found;
    two.posts[1].put(key(6), bytes_of(6));
    two.posts[1].put(key(7), bytes_of(7));
    const auto last = two.posts[1].last(5);
    REQUIRE(last.has_value());
    EXPECT(last->key.seq == 7 && std::ranges::equal(last->input, bytes_of(7)));
    EXPECT(two.look(0, key(6), &found) == Posts::Found::Input);
    const auto word = two.posts[0].word(1, 6);
    EXPECT_EQ(word.at->load(), word.seen);
    const auto place = two.boards[1].place();
    two.boards[1].give_back();
    REQUIRE(two.boards[1].open(two.memory) && two.boards[1].place() == place);
    EXPECT(!two.posts[1].last(8));
    EXPECT(two.look(0, key(6), &found) == Posts::Found::Input);  // who has ended it has not taken it back
    two.posts[1].put(key(6, 8), bytes_of(1));
    EXPECT(word.at->load() > word.seen && two.look(0, key(6), &found) == Posts::Found::Nothing);
}

FT_TEST(post_is_seen_as_a_whole_or_not_at_all) {
    Two two;
    const auto length = [](std::size_t value) { return 1 + value * 16; };
    std::atomic<bool> over{false};
    std::thread writer([&] {
        for (std::size_t i = 0; i < 100'000; ++i)
            two.posts[1].put(key(2), Bytes(length(i % 256), static_cast<std::byte>(i % 256)));
        over = true;
    });
    int torn = 0;
    while (!over) {
        ByteView found;
        if (two.look(0, key(2), &found) != Posts::Found::Input) continue;
        torn += found.size() != length(static_cast<std::size_t>(found[0])) ||
                std::ranges::any_of(found, [&](std::byte b) { return b != found[0]; });
    }
    writer.join();
    EXPECT_EQ(torn, 0);
}

// Each puts something in, and then looks: of two who do it at once one finds the other's, and nudges it.
FT_TEST(of_two_who_put_something_in_at_once_one_finds_the_others) {
    constexpr std::uint64_t kRounds = 60'000;
    Two two;
    std::array<std::atomic<std::uint64_t>, 2> at{};
    std::array<std::vector<char>, 2> seen{std::vector<char>(kRounds + 1), std::vector<char>(kRounds + 1)};
    const auto run = [&](std::size_t rank) {
        for (std::uint64_t round = 1; round <= kRounds; ++round) {
            at[rank].store(round);
            while (at[1 - rank].load() < round) std::this_thread::yield();
            two.posts[rank].put(key(round), {});
            ByteView found;
            seen[rank][round] = two.look(static_cast<int>(rank), key(round), &found) == Posts::Found::Input;
        }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    std::uint64_t lost = 0;
    for (std::uint64_t round = 1; round <= kRounds; ++round) lost += seen[0][round] == 0 && seen[1][round] == 0;
    EXPECT_EQ(lost, 0u);
}

}  // namespace ftcomm::unit
