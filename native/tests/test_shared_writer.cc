#include "base/shared_writer.h"

#include <cstring>
#include <vector>

#include "tests/unit.h"

namespace ftcomm {
namespace {

constexpr std::size_t kPiece = 60u << 10;

// As copy() would of so many pieces, of which those into the caches take `slow` a byte, of readers of this side `kNear`: how many these are.
constexpr double kNear = 0.05, kFar = 0.4;

int into_caches(SharedWriter& writer, int pieces, double slow, double near_share = 0) {
    int n = 0;
    double turn = 0;
    for (int i = 0; i < pieces; ++i) {
        turn += near_share;
        const bool near = turn >= 1;
        if (near) turn -= 1;
        if (writer.way() == Into::Memory) {
            writer.went_past();
            continue;
        }
        ++n;
        writer.took(kPiece, static_cast<std::int64_t>((near ? kNear : slow) * kPiece));
    }
    return n;
}

}  // namespace

FT_TEST(writes_follow_where_the_other_cores_are) {
    SharedWriter writer;
    EXPECT_EQ(into_caches(writer, 10'000, kNear), 10'000);
    EXPECT_EQ(into_caches(writer, 10'000, 0.15), 10'000);
    EXPECT_EQ(into_caches(writer, 2, kFar), 1);  // at once
    EXPECT(into_caches(writer, 5'000, kFar) < 15);
    EXPECT(into_caches(writer, 100'000, kFar) <= 100);  // one in a thousand
    EXPECT(into_caches(writer, 100'000, kFar, 0.37) <= 300);  // some readers are on this side
    into_caches(writer, static_cast<int>(SharedWriter::kLongestHold) + 1, kNear);
    EXPECT_EQ(into_caches(writer, 1'000, kNear), 1'000);
}

FT_TEST(where_nothing_is_measured_writes_stay_in_the_caches) {
    SharedWriter writer(false);
    EXPECT_EQ(into_caches(writer, 500, kFar), 500);
    EXPECT(!writer.goes_round());
}

FT_TEST(one_slow_write_costs_little) {
    SharedWriter writer;
    for (int turn = 0; turn < 100; ++turn) {  // an interrupt, a page fault
        into_caches(writer, 1, kFar);
        EXPECT_EQ(into_caches(writer, 1'000, kNear), 1'000 - static_cast<int>(SharedWriter::kFirstHold));
    }
    for (int i = 0; i < 100; ++i) writer.took(kPiece, 5 * kPiece);
    EXPECT(writer.way() == Into::Caches);  // it was not running
}

FT_TEST(writes_past_the_caches_or_not_are_copies) {
    SharedWriter writer;
    std::vector<unsigned char> from(100000), to(100000);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 31 + (i >> 8));
    for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{99999}})
        for (int i = 0; i < 40; ++i) {
            std::memset(to.data(), 0, to.size());
            writer.copy(to.data() + 1, from.data(), bytes);
            EXPECT(bytes == 0 || std::memcmp(to.data() + 1, from.data(), bytes) == 0);
            EXPECT(to[0] == 0 && (bytes + 1 == to.size() || to[bytes + 1] == 0));
        }
}

}  // namespace ftcomm
