// Conversions of small floats against definitions written from the formats, over all values where that is possible.
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/float_codec.h"
#include "base/random.h"
#include "tests/reference.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

using test::Format;

template <class Decode, class Encode, class Bits>
void check_format(const Format& format, Decode decode, Encode encode, Bits) {
    const int values = 1 << format.bits;
    for (int v = 0; v < values; ++v) {
        const double expected = test::decode(format, static_cast<std::uint32_t>(v));
        const float got = decode(static_cast<Bits>(v));
        if (std::isnan(expected)) {
            EXPECT(std::isnan(got));
            EXPECT(std::isnan(decode(encode(got))));
            continue;
        }
        EXPECT_EQ(static_cast<double>(got), expected);
        EXPECT_EQ(std::signbit(got), std::signbit(expected));
        EXPECT_EQ(encode(got), static_cast<Bits>(v));
        // Around each value and halfway to the next one: rounding to nearest even.
        if (v + 1 < values && std::isfinite(expected)) {
            const double next = test::decode(format, static_cast<std::uint32_t>(v + 1));
            if (!std::isfinite(next)) continue;
            const float middle = static_cast<float>((expected + next) / 2);
            for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e38f), std::nextafter(middle, -1e38f)})
                EXPECT_EQ(encode(x), static_cast<Bits>(test::encode(format, x)));
        }
    }
    for (float x : {0.0f,
                    -0.0f,
                    447.9f,
                    448.0f,
                    463.9f,
                    464.0f,
                    464.1f,
                    479.9f,
                    480.0f,
                    57344.0f,
                    61439.9f,
                    61440.0f,
                    65504.0f,
                    65519.9f,
                    65520.0f,
                    65536.0f,
                    1e38f,
                    -1e38f,
                    1e-40f,
                    -1e-40f,
                    0x1p-24f,
                    0x1p-25f,
                    0x1.000002p-25f,
                    0x1p-10f,
                    0x1p-17f,
                    3.4028235e38f,
                    -3.4028235e38f,
                    std::numeric_limits<float>::infinity(),
                    -std::numeric_limits<float>::infinity()})
        EXPECT_EQ(encode(x), static_cast<Bits>(test::encode(format, x)));
    for (float x : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                    std::numeric_limits<float>::signaling_NaN(), codec::float_of(0x7f800001u), codec::float_of(0xffffffffu)})
        EXPECT(std::isnan(decode(encode(x))));
    Random random(7);
    for (int i = 0; i < 200000; ++i) {
        const float x = codec::float_of(static_cast<std::uint32_t>(random()));
        if (std::isnan(x)) EXPECT(std::isnan(decode(encode(x))));
        else EXPECT_EQ(encode(x), static_cast<Bits>(test::encode(format, x)));
    }
}

}  // namespace

FT_TEST(codec_float16) { check_format(test::kFloat16, codec::decode_float16, codec::encode_float16, std::uint16_t{}); }
FT_TEST(codec_bfloat16) { check_format(test::kBFloat16, codec::decode_bfloat16, codec::encode_bfloat16, std::uint16_t{}); }
FT_TEST(codec_float8_e4m3) {
    check_format(test::kFloat8E4M3, codec::decode_float8_e4m3, codec::encode_float8_e4m3, std::uint8_t{});
}
FT_TEST(codec_float8_e5m2) {
    check_format(test::kFloat8E5M2, codec::decode_float8_e5m2, codec::encode_float8_e5m2, std::uint8_t{});
}

}  // namespace ftcomm
