#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/host_info.h"
#include "base/json.h"
#include "base/random.h"
#include "tests/unit.h"

namespace ftcomm {

FT_TEST(json_writes_valid_text) {
    EXPECT_EQ(json_quote("a\"b\\c\n\t\x01"), "\"a\\\"b\\\\c\\n\\u0009\\u0001\"");
    EXPECT_EQ(json_quote("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"");
    EXPECT_EQ(json_quote("\xff\xc3"), "\"\\ufffd\\ufffd\"");
    EXPECT_EQ(json_quote("\xed\xa0\x80\xc0\xaf"), "\"\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\"");
    EXPECT_EQ(JsonObject().text(), "{}");
    EXPECT_EQ(JsonArray().text(), "[]");
    const auto text = JsonObject()
                          .add("s", std::string("x"))
                          .add("c", "y")
                          .add("i", -3)
                          .add("u", ~std::uint64_t{0})
                          .add("byte", std::uint8_t{7})
                          .add("b", true)
                          .add("d", 0.1)
                          .add("nan", 0.0 / 0.0)
                          .add("v", std::vector<int>{1, 2})
                          .add("f", std::vector<bool>{true, false})
                          .raw("o", JsonArray().add("z").raw("{}").text())
                          .text();
    EXPECT_EQ(text,
              "{\"s\":\"x\",\"c\":\"y\",\"i\":-3,\"u\":18446744073709551615,\"byte\":7,\"b\":true,\"d\":0.1,\"nan\":null,"
              "\"v\":[1,2],\"f\":[true,false],\"o\":[\"z\",{}]}");
}

FT_TEST(random_repeats_and_stays_in_range) {
    std::uint64_t state = 0;
    EXPECT_EQ(splitmix64(state), 0xe220a8397b1dcdafULL);  // the published first output of seed 0
    Random a(9), b(9), c(10);
    EXPECT_EQ(a(), b());
    EXPECT(a() != c());
    std::set<std::uint64_t> seen;
    for (int i = 0; i < 10000; ++i) {
        const auto x = a.below(7);
        EXPECT(x < 7);
        seen.insert(x);
        const auto y = a.between(-2, 2);
        EXPECT(y >= -2 && y <= 2);
        const double u = a.uniform();
        EXPECT(u >= 0 && u < 1);
    }
    EXPECT_EQ(seen.size(), 7u);
    EXPECT(os_random64() != os_random64());
}

FT_TEST(clock_does_not_go_back) {
    const auto before = monotonic_ns();
    EXPECT(before > 0);
    EXPECT(monotonic_ns() >= before);
}

FT_TEST(host_info_is_complete) {
    const HostInfo info = probe_host();
    EXPECT(!info.kernel.empty());
    EXPECT(!info.machine.empty());
    EXPECT(!info.reduce_kernels.empty());
    EXPECT(to_json(info).find("\"futex_waitv\":") != std::string::npos);
}

}  // namespace ftcomm
