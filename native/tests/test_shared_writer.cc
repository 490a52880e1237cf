#include "base/shared_writer.h"

#include <cstring>
#include <vector>

#include "tests/unit.h"

namespace ftcomm {
namespace {

constexpr std::size_t kPiece = 60u << 10;

// As copy() would of pieces that take so long each way: whether they go past the caches after so many.
bool past_after(SharedWriter& writer, int pieces, double past, double slow, double near_share = 0) {
    double turn = 0;
    for (int i = 0; i < pieces; ++i) {
        const auto into = writer.probes() ? Into::Caches : writer.way();
        turn += near_share;
        const bool near = turn >= 1;
        if (near) turn -= 1;
        const auto each = into == Into::Memory ? past : near ? 0.05 : slow;
        writer.took(into, kPiece, static_cast<std::int64_t>(each * kPiece));
    }
    return writer.way() == Into::Memory;
}

}  // namespace

FT_TEST(writes_follow_where_the_other_cores_are) {
    SharedWriter writer(true);
    EXPECT(past_after(writer, 500, 0.05, 0.4));
    EXPECT(past_after(writer, 500, 0.05, 0.4, 0.5));  // half of the readers are on this side
    EXPECT(!past_after(writer, 500, 0.08, 0.05));
    EXPECT(!past_after(writer, 500, 0.08, 0.15));
    EXPECT(past_after(writer, 12, 0.05, 0.4, 0.5));  // at once
    EXPECT(past_after(writer, 50, 0.08, 0.05));  // a few tries first
    EXPECT(!past_after(writer, 500, 0.08, 0.05));
    for (int i = 0; i < 100; ++i) writer.took(Into::Caches, kPiece, i % 2 == 0 ? 5 * kPiece : kPiece / 20);
    EXPECT(writer.way() == Into::Caches);  // it was not running
}

FT_TEST(where_nothing_is_measured_writes_stay_in_the_caches) {
    SharedWriter writer(false);
    EXPECT(!past_after(writer, 500, 0.05, 0.4));
}

FT_TEST(writes_past_the_caches_or_not_are_copies) {
    SharedWriter writer(true);
    std::vector<unsigned char> from(100000), to(100000);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 31 + (i >> 8));
    for (std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{8191}, std::size_t{8192}, std::size_t{99999}})
        for (int i = 0; i < 40; ++i) {
            std::memset(to.data(), 0, to.size());
            writer.copy(to.data() + 1, from.data(), bytes);
            EXPECT(bytes == 0 || std::memcmp(to.data() + 1, from.data(), bytes) == 0);
            EXPECT(to[0] == 0 && (bytes + 1 == to.size() || to[bytes + 1] == 0));
        }
}

}  // namespace ftcomm
