#include <string>

#include "base/bytes.h"
#include "base/random.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

RankSet random_set(Random& random) {
    RankSet set;
    const int n = static_cast<int>(random.below(40)), limit = 1 + static_cast<int>(random.below(kMaxRanks));
    for (int i = 0; i < n; ++i) set.add(static_cast<int>(random.below(static_cast<std::uint64_t>(limit))));
    return set;
}

struct Record {
    std::uint8_t small = 0;
    std::int64_t big = 0;
    std::string text;
    RankSet ranks;
    double real = 0;
};

Bytes write_record(const Record& r) {
    ByteWriter w;
    w.put(r.small).put(r.big).text(r.text).ranks(r.ranks).put(r.real);
    return w.take();
}

Record read_record(ByteReader& in) {
    Record r;
    r.small = in.get<std::uint8_t>();
    r.big = in.get<std::int64_t>();
    r.text = in.text();
    r.ranks = in.ranks();
    r.real = in.get<double>();
    return r;
}

}  // namespace

FT_TEST(bytes_round_trip_and_every_truncation) {
    Random random(6);
    for (int i = 0; i < 200; ++i) {
        Record r{static_cast<std::uint8_t>(random()), static_cast<std::int64_t>(random()),
                 std::string(random.below(50), static_cast<char>('a' + random.below(26))), random_set(random), random.uniform()};
        const Bytes data = write_record(r);
        ByteReader in(data);
        const Record back = read_record(in);
        EXPECT(in.done());
        EXPECT_EQ(back.small, r.small);
        EXPECT_EQ(back.big, r.big);
        EXPECT_EQ(back.text, r.text);
        EXPECT_EQ(back.ranks.text(), r.ranks.text());
        EXPECT_EQ(back.real, r.real);
        for (std::size_t n = 0; n < data.size(); ++n) {
            const Bytes part(data.begin(),
                             data.begin() + static_cast<std::ptrdiff_t>(n));  // its own block: a sanitizer sees overruns
            ByteReader cut(part);
            read_record(cut);
            EXPECT(!cut.ok());
            EXPECT(!cut.done());
        }
        Bytes longer = data;
        longer.push_back(std::byte{0});
        ByteReader rest(longer);
        read_record(rest);
        EXPECT(rest.ok());
        EXPECT(!rest.done());
    }
}

FT_TEST(bytes_view_is_what_take_gives) {  // short ones are not on the heap
    for (std::size_t size = 0; size <= 200; ++size) {
        Bytes expected;
        ByteWriter one, more;
        for (std::size_t i = 0; i < size; ++i) {
            const auto b = static_cast<std::uint8_t>(3 * i + size);
            expected.push_back(static_cast<std::byte>(b));
            one.put(b);
        }
        for (std::size_t i = 0; i < size;) {
            if (size - i >= 8) {
                std::uint64_t word = 0;
                std::memcpy(&word, expected.data() + i, 8);
                more.put(word);
                i += 8;
            } else {
                more.put(std::to_integer<std::uint8_t>(expected[i++]));
            }
        }
        for (auto* w : {&one, &more}) {
            const auto view = w->view();
            EXPECT(Bytes(view.begin(), view.end()) == expected);
            const auto copy = *w;
            EXPECT(Bytes(copy.view().begin(), copy.view().end()) == expected);
            EXPECT(w->take() == expected);
        }
    }
}

FT_TEST(bytes_survive_garbage) {
    Random random(7);
    for (int i = 0; i < 20000; ++i) {
        Bytes data(random.below(80));
        for (auto& b : data) b = static_cast<std::byte>(random.chance(0.3) ? 0 : random());
        ByteReader in(data);
        read_record(in);
        ByteReader counts(data);
        const auto n = counts.count(8);
        EXPECT(n * std::size_t{8} <= data.size());
    }
}

FT_TEST(bytes_errors_stay) {
    ByteWriter w;
    w.put(std::uint32_t{1000}).put(std::uint64_t{5});
    const Bytes data = w.take();
    ByteReader in(data);
    EXPECT(in.bytes().empty());
    EXPECT(!in.ok());
    in.get<std::uint8_t>();
    EXPECT(!in.ok());
    ByteReader counted(data);
    EXPECT_EQ(counted.count(1), 0u);
    EXPECT(!counted.ok());
    ByteWriter too_many;
    too_many.put(static_cast<std::uint8_t>(kMaxRanks / 64 + 1));
    for (int i = 0; i <= kMaxRanks / 64; ++i) too_many.put(std::uint64_t{1});
    const Bytes wide = too_many.take();
    ByteReader ranks(wide);
    EXPECT(ranks.ranks().empty());
    EXPECT(!ranks.ok());
}

FT_TEST(rank_set_against_a_list) {
    Random random(8);
    for (int i = 0; i < 300; ++i) {
        const RankSet a = random_set(random), b = random_set(random);
        int count = 0, lowest = -1;
        for (int r = 0; r < kMaxRanks; ++r) {
            const bool in_a = a.has(r), in_b = b.has(r);
            EXPECT_EQ((a & b).has(r), in_a && in_b);
            EXPECT_EQ((a | b).has(r), in_a || in_b);
            EXPECT_EQ((a - b).has(r), in_a && !in_b);
            count += in_a;
            if (in_a && lowest < 0) lowest = r;
        }
        EXPECT_EQ(a.count(), count);
        EXPECT_EQ(a.lowest(), lowest);
        EXPECT_EQ(a.empty(), count == 0);
        EXPECT_EQ(static_cast<int>(a.list().size()), count);
        EXPECT(RankSet::of(a.list()) == a);
        EXPECT(a.contains(a & b));
        EXPECT((a | b).contains(b));
        EXPECT_EQ(a.contains(b), (b - a).empty());
        if (lowest >= 0) {
            RankSet without = a;
            without.remove(lowest);
            EXPECT(!without.has(lowest));
            EXPECT(!(without == a));
            EXPECT_EQ(without.count(), count - 1);
        }
    }
    EXPECT_EQ(RankSet::first(kMaxRanks).count(), kMaxRanks);
    EXPECT_EQ(RankSet::first(3).text(), "{0,1,2}");
    EXPECT(!RankSet::first(3).has(-1));
    EXPECT(!RankSet::first(3).has(kMaxRanks));
}

}  // namespace ftcomm
