#include "base/copy.h"

#include <cstring>
#include <vector>

#include "base/random.h"
#include "tests/unit.h"

namespace ftcomm {

FT_TEST(copies_are_as_memcpys_wherever_pages_begin) {
    constexpr std::size_t kPage = 4096, kMost = 3 * kPage;
    std::vector<unsigned char> from(kMost + 2 * kPage), to(from.size()), before(from.size());
    Random random(5);
    for (auto& byte : from) byte = static_cast<unsigned char>(random.below(256));
    for (auto& byte : before) byte = static_cast<unsigned char>(random.below(256));
    const auto start = -reinterpret_cast<std::uintptr_t>(to.data()) + reinterpret_cast<std::uintptr_t>(from.data());
    int slow = 0;
    for (std::size_t size : {0, 1, 15, 63, 64, 80, 200, 2047, 2048, 2049, 4096, 5000, 12288})
        for (std::size_t in : {0, 1, 16, 40, 64})
            for (std::size_t apart : {0, 1, 8, 15, 16, 31, 32, 33, 48, 64, 2048, 4080, 4095}) {
                const auto out = (start + in + apart) % kPage;  // so much further into its page than the source
                for (int way = 0; way < 3; ++way) {
                    to = before;
                    auto* const at = to.data() + out;
                    slow += way == 0 && is_slow_to_move(at, from.data() + in);
                    if (way == 0) copy_bytes(at, from.data() + in, size);
                    if (way == 1) copy_by_vectors(at, from.data() + in, size);
                    if (way == 2) copy_past_cache(at, from.data() + in, size);
                    auto wanted = before;
                    std::memcpy(wanted.data() + out, from.data() + in, size);
                    EXPECT(to == wanted);
                }
            }
    EXPECT_EQ(slow, 13 * 5 * 5);
}

}  // namespace ftcomm
