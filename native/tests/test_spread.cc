// Records along a tree: each rank gets each once, and the trees for both directions fit together.
#include "channel/spread.h"

#include <algorithm>
#include <map>

#include "unit.h"

namespace ftcomm::unit {

namespace {

const int kDegrees[] = {1, 2, 3, 16};

struct Got {
    std::map<int, int> copies;
    int depth = 0, most_sent = 0;
};

// `from` sends, everybody passes on; `reachable`: whom those on the way still know.
void pass_on(ByteView record, const std::vector<int>& slots, int degree, const RankSet& reachable, int depth, Got* got) {
    const auto frames = spread(record, slots, degree);
    got->most_sent = std::max(got->most_sent, static_cast<int>(frames.size()));
    for (const auto& frame : frames) {
        Spread told;
        REQUIRE(Spread::decode(frame.payload, &told));
        EXPECT(std::equal(told.record.begin(), told.record.end(), record.begin(), record.end()));
        ++got->copies[frame.slot];
        got->depth = std::max(got->depth, depth);
        pass_on(told.record, (told.rest & reachable).list(), degree, reachable, depth + 1, got);
    }
}

RankSet every_third(int n) {
    RankSet out;
    for (int i = 0; i < n; ++i) out.add(3 * i + 1);
    return out;
}

int longest_way(int n, int degree) {  // of a tree with n ranks below its root
    int ways = 0;
    for (; n > 0; n = (n + degree - 1) / degree - 1) ++ways;
    return ways;
}

}  // namespace

FT_TEST(spread_reaches_all_once) {
    const Bytes record(5, std::byte{7});
    for (int degree : kDegrees) {
        for (int n = 0; n < 40; ++n) {
            const auto slots = every_third(n);
            Got got;
            pass_on(record, slots.list(), degree, slots, 1, &got);
            EXPECT_EQ(static_cast<int>(got.copies.size()), n);
            for (const auto& [slot, copies] : got.copies) EXPECT(slots.has(slot) && copies == 1);
            EXPECT(got.most_sent <= degree);
            EXPECT_EQ(got.depth, longest_way(n, degree));
        }
    }
}

FT_TEST(spread_to_a_thousand_is_three_steps) {
    const Bytes record(5, std::byte{7});
    Got got;
    pass_on(record, RankSet::first(1000).list(), kSpreadDegree, RankSet::first(1000), 1, &got);
    EXPECT_EQ(got.depth, 3);
    EXPECT_EQ(got.copies.size(), 1000u);
}

// Who is out is left out, and nobody else is.
FT_TEST(spread_goes_past_those_who_are_out) {
    const Bytes record(5, std::byte{7});
    for (int degree : kDegrees) {
        auto reachable = RankSet::first(30);
        for (int s : {3, 4, 11, 29}) reachable.remove(s);
        Got got;
        pass_on(record, (RankSet::first(30) & reachable).list(), degree, reachable, 1, &got);
        for (int s = 0; s < 30; ++s) EXPECT_EQ(got.copies[s], reachable.has(s) ? 1 : 0);
    }
}

FT_TEST(spread_goes_in_the_order_given) {
    const std::vector<int> order{9, 2, 5, 7};
    const auto frames = spread({}, order, 1);
    REQUIRE(frames.size() == 1);
    EXPECT_EQ(frames[0].slot, 9);
}

FT_TEST(spread_is_not_read_from_garbage) {
    Spread told;
    EXPECT(!Spread::decode({}, &told));
    const Bytes cut{std::byte{2}, std::byte{0}};  // two words of a set, and not one is there
    EXPECT(!Spread::decode(cut, &told));
}

// What comes together: each rank's part is its own and those of the ranks that have it for a parent.
FT_TEST(places_in_a_tree_fit_together) {
    for (int degree : kDegrees) {
        for (int n = 1; n < 60; ++n) {
            const auto ranks = every_third(n);
            std::map<int, RankSet> from_below;
            std::map<int, int> children;
            for (int r : ranks.list()) from_below[r] = RankSet::only(r);
            for (int r : ranks.list()) {
                const auto place = place_in_tree(ranks, r, degree);
                if (place.parent < 0) continue;
                EXPECT(ranks.has(place.parent) && place.parent < r);
                EXPECT((from_below[place.parent] & place.part).empty());
                from_below[place.parent] = from_below[place.parent] | place.part;
                ++children[place.parent];
            }
            for (int r : ranks.list()) {
                const auto place = place_in_tree(ranks, r, degree);
                EXPECT(place.part == from_below[r]);
                EXPECT_EQ(place.parent < 0, r == ranks.lowest());
                EXPECT(children[r] <= degree);
            }
            EXPECT(place_in_tree(ranks, ranks.lowest(), degree).part == ranks);
        }
    }
}

}  // namespace ftcomm::unit
