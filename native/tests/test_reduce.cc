// Every kernel of every instruction set that runs here, for all element types and operators, against reference.cc:
// random bits (so also NaNs, infinities, subnormals), special values, odd sizes, unaligned pointers, both aliasings.
#include <cfenv>
#include <cstddef>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/bytes.h"
#include "base/float_codec.h"
#include "base/random.h"
#include "base/reduce.h"
#include "base/reduce_kernels.h"
#include "tests/reference.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

constexpr std::size_t kSizes[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 1000, 4097};

std::vector<DType> dtypes() {
    std::vector<DType> out;
    for (int d = 0; d < kDTypes; ++d) out.push_back(static_cast<DType>(d));
    return out;
}

std::vector<ReduceOp> ops() {
    std::vector<ReduceOp> out;
    for (int o = 0; o < kReduceOps; ++o) out.push_back(static_cast<ReduceOp>(o));
    return out;
}

// Numbers of ordinary size for floats half of the time: sums of random bits are mostly one of the two numbers.
void fill(DType dtype, Random& random, std::byte* p, std::size_t count) {
    const std::size_t size = size_of(dtype);
    for (std::size_t i = 0; i < count * size; ++i) p[i] = static_cast<std::byte>(random());
    const auto put = [](std::byte* at, auto value) { std::memcpy(at, &value, sizeof value); };
    const auto ordinary = [&] { return static_cast<double>(random.between(-4096, 4096)) / 64; };
    for (std::size_t i = 0; i < count; ++i) {
        std::byte* at = p + i * size;
        const bool plain = random.chance(0.5);
        if (dtype == DType::Bool) put(at, static_cast<std::uint8_t>(random.below(2)));
        if (!plain) continue;
        const double x = ordinary();
        switch (dtype) {
            case DType::Float64: put(at, x); break;
            case DType::Float32: put(at, static_cast<float>(x)); break;
            case DType::Float16: put(at, codec::encode_float16(static_cast<float>(x))); break;
            case DType::BFloat16: put(at, codec::encode_bfloat16(static_cast<float>(x))); break;
            case DType::Float8E4M3: put(at, codec::encode_float8_e4m3(static_cast<float>(x))); break;
            case DType::Float8E5M2: put(at, codec::encode_float8_e5m2(static_cast<float>(x))); break;
            case DType::Complex64: put(at, static_cast<float>(x)), put(at + 4, static_cast<float>(ordinary())); break;
            case DType::Complex128: put(at, x), put(at + 8, ordinary()); break;
            default: break;
        }
    }
}

// A buffer at an odd distance from alignment, with guard bytes that must stay as they are.
class Buffer {
public:
    Buffer(DType dtype, std::size_t count, std::size_t shift)
        : bytes_(count * size_of(dtype)), shift_(shift + kGuard), data_(bytes_ + 2 * kGuard + 64, std::byte{0xa5}) {}
    std::byte* get() { return data_.data() + shift_; }
    bool guards_hold() const {
        for (std::size_t i = 0; i < data_.size(); ++i)
            if ((i < shift_ || i >= shift_ + bytes_) && data_[i] != std::byte{0xa5}) return false;
        return true;
    }

private:
    static constexpr std::size_t kGuard = 64;
    std::size_t bytes_, shift_;
    Bytes data_;
};

bool compare(const char* what, const ReduceKernels& kernels, DType dtype, std::size_t count, const std::byte* got,
             const std::byte* expected) {
    const std::size_t size = size_of(dtype);
    for (std::size_t i = 0; i < count; ++i) {
        if (test::same_element(dtype, got + i * size, expected + i * size)) continue;
        unit::failed(__FILE__, __LINE__,
                     std::string(kernels.name) + " " + what + " of " + to_string(dtype) + ": element " + std::to_string(i) +
                         " of " + std::to_string(count) + " differs");
        return false;
    }
    return true;
}

void check_reduce(const ReduceKernels& kernels, DType dtype, ReduceOp op, std::size_t count, std::size_t shift, Random& random) {
    Buffer a(dtype, count, shift), b(dtype, count, shift * 3 % 32), out(dtype, count, shift * 5 % 32);
    fill(dtype, random, a.get(), count);
    fill(dtype, random, b.get(), count);
    const std::size_t size = size_of(dtype);
    Bytes expected(count * size + 1);
    for (std::size_t i = 0; i < count; ++i)
        test::reduce_one(dtype, op, expected.data() + i * size, a.get() + i * size, b.get() + i * size);
    kernels.reduce(dtype, op, out.get(), a.get(), b.get(), count);
    compare(to_string(op), kernels, dtype, count, out.get(), expected.data());
    Buffer left(a), right(b);
    kernels.reduce(dtype, op, left.get(), left.get(), b.get(), count);
    compare(to_string(op), kernels, dtype, count, left.get(), expected.data());
    kernels.reduce(dtype, op, right.get(), a.get(), right.get(), count);
    compare(to_string(op), kernels, dtype, count, right.get(), expected.data());
    for (const auto* buffer : {&a, &b, &out, &left, &right}) EXPECT(buffer->guards_hold());
}

}  // namespace

FT_TEST(reduce_all_combinations) {
    Random random(1);
    for (const auto* kernels : available_reduce_kernels())
        for (auto dtype : dtypes())
            for (auto op : ops())
                if (reduce_supported(dtype, op))
                    for (auto count : kSizes)
                        for (std::size_t shift : {0, 1, 13}) check_reduce(*kernels, dtype, op, count, shift, random);
}

FT_TEST(reduce_small_floats_exhaustive) {  // all pairs of the 8-bit formats
    Bytes a(1 << 16), b(1 << 16), out(1 << 16), expected(1 << 16);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::byte>(i), b[i] = static_cast<std::byte>(i >> 8);
    for (auto dtype : {DType::Float8E4M3, DType::Float8E5M2})
        for (auto op : {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
            for (std::size_t i = 0; i < a.size(); ++i) test::reduce_one(dtype, op, &expected[i], &a[i], &b[i]);
            for (const auto* kernels : available_reduce_kernels()) {
                kernels->reduce(dtype, op, out.data(), a.data(), b.data(), a.size());
                compare(to_string(op), *kernels, dtype, a.size(), out.data(), expected.data());
            }
        }
}

FT_TEST(reduce_divide_and_scale) {
    Random random(2);
    for (const auto* kernels : available_reduce_kernels())
        for (auto dtype : dtypes())
            for (auto count : kSizes) {
                const std::size_t size = size_of(dtype);
                Buffer input(dtype, count, 5);
                fill(dtype, random, input.get(), count);
                if (reduce_supported(dtype, ReduceOp::Avg))
                    for (std::uint32_t divisor : {1u, 2u, 3u, 7u, 8u, 300u, 1024u, 70000u, 0xffffffffu}) {
                        Buffer got(input), expected(input);
                        kernels->divide(dtype, got.get(), count, divisor);
                        for (std::size_t i = 0; i < count; ++i) test::divide_one(dtype, expected.get() + i * size, divisor);
                        compare("division", *kernels, dtype, count, got.get(), expected.get());
                        EXPECT(got.guards_hold());
                    }
                if (reduce_supported(dtype, ReduceOp::PremulSum))
                    for (double factor : {0.5, -0.1, 3.0, 1e30}) {
                        Buffer got(input), expected(input);
                        kernels->scale(dtype, got.get(), input.get(), count, factor);
                        for (std::size_t i = 0; i < count; ++i)
                            test::scale_one(dtype, expected.get() + i * size, input.get() + i * size, factor);
                        compare("scaling", *kernels, dtype, count, got.get(), expected.get());
                        kernels->scale(dtype, input.get(), input.get(), count, 1.0);
                        EXPECT(got.guards_hold());
                    }
            }
}

FT_TEST(reduce_combine_rounds_once) {
    // 2048 + 1 is a tie in float16 and goes back to 2048; 2048 + 1 + 1 is not.
    constexpr std::size_t count = 1500;
    std::vector<float> wide(count);
    std::vector<std::uint16_t> parts(3 * count), out(count);
    const auto& kernels = reduce_kernels();
    for (std::size_t k = 0; k < 3; ++k) {
        wide.assign(count, k == 0 ? 2048.0f : 1.0f);
        kernels.narrow(DType::Float16, parts.data() + k * count, wide.data(), count);
    }
    auto check = [&](ReduceOp op, std::uint32_t divisor, float expected) {
        combine(DType::Float16, op, out.data(), parts.data(), 3, count, divisor);
        kernels.widen(DType::Float16, wide.data(), out.data(), count);
        for (auto x : wide) EXPECT(x == expected);
    };
    check(ReduceOp::Sum, 1, 2050.0f);
    check(ReduceOp::Avg, 2, 1025.0f);
    check(ReduceOp::Max, 1, 2048.0f);
    // The average of values whose sum overflows float16.
    wide.assign(count, 60000.0f);
    for (std::size_t k = 0; k < 3; ++k) kernels.narrow(DType::Float16, parts.data() + k * count, wide.data(), count);
    kernels.widen(DType::Float16, wide.data(), parts.data(), count);
    check(ReduceOp::Avg, 3, std::vector<float>(wide)[0]);
}

FT_TEST(reduce_and_divide_round_once) {
    constexpr std::size_t count = 1500;
    const std::vector<float> wide(count, 60000.0f);
    std::vector<std::uint16_t> a(count), out(count);
    narrow(DType::Float16, a.data(), wide.data(), count);
    reduce(DType::Float16, ReduceOp::Avg, out.data(), a.data(), a.data(), count, 2);  // of values whose sum overflows float16
    EXPECT(out == a);
    reduce(DType::Float16, ReduceOp::Avg, a.data(), a.data(), out.data(), count, 2);  // in place
    EXPECT(out == a);
}

FT_TEST(reduce_combine_is_a_chain_of_reduce) {
    Random random(7);
    for (auto dtype : {DType::Float64, DType::Float32, DType::Int32, DType::UInt8, DType::Complex64})
        for (auto count : kSizes) {
            const auto size = size_of(dtype) * count;
            Buffer parts(dtype, 4 * count, 0), chain(dtype, count, 0), out(dtype, count, 0);
            fill(dtype, random, parts.get(), 4 * count);
            combine(dtype, ReduceOp::Avg, out.get(), parts.get(), 4, count, 4);
            std::memcpy(chain.get(), parts.get(), size);
            for (std::size_t k = 1; k < 4; ++k)
                reduce(dtype, ReduceOp::Sum, chain.get(), chain.get(), parts.get() + k * size, count);
            divide(dtype, chain.get(), count, 4);
            compare("a combination", reduce_kernels(), dtype, count, out.get(), chain.get());
        }
}

FT_TEST(reduce_combine_gives_it_to_two) {
    // The second place, or the first one, is an input: as a caller's buffer that is summed in place.
    Random random(8);
    for (auto dtype : {DType::Float32, DType::BFloat16, DType::Int64})
        for (auto count : kSizes) {
            const auto size = size_of(dtype) * count;
            for (std::size_t own = 0; own < 3; ++own) {
                Buffer parts(dtype, 3 * count, 0), mine(dtype, count, 0), kept(dtype, count, 0), wanted(dtype, count, 0);
                fill(dtype, random, parts.get(), 3 * count);
                std::memcpy(mine.get(), parts.get() + own * size, size);
                std::vector<const std::byte*> inputs;
                for (std::size_t k = 0; k < 3; ++k) inputs.push_back(k == own ? mine.get() : parts.get() + k * size);
                combine(dtype, ReduceOp::Sum, wanted.get(), inputs, count, 1);
                const bool first = own < 2;
                combine(dtype, ReduceOp::Sum, first ? mine.get() : kept.get(), inputs, count, 1, first ? kept.get() : mine.get());
                compare("a sum", reduce_kernels(), dtype, count, mine.get(), wanted.get());
                compare("what is kept of it", reduce_kernels(), dtype, count, kept.get(), wanted.get());
            }
        }
}

FT_TEST(reduce_goes_by_the_same_rules_in_every_thread) {
    constexpr std::size_t count = 40;
    const float small = 1e-39f;  // a subnormal number
    const std::vector<float> a(count, small), twice(count, 2 * small), b(count, 1.0f), c(count, 1e-8f);
    std::vector<float> out(count), rough(count);
    std::vector<std::uint16_t> half(count), narrowed(count);
    narrow(DType::BFloat16, narrowed.data(), a.data(), count);
    widen(DType::BFloat16, rough.data(), narrowed.data(), count);
    const auto same = [&](const std::vector<float>& wanted) {  // bit for bit: such a thread takes small ones for zeros, too
        return std::memcmp(out.data(), wanted.data(), count * sizeof(float)) == 0;
    };
    const auto check = [&] {
        reduce(DType::Float32, ReduceOp::Sum, out.data(), a.data(), a.data(), count);
        EXPECT(same(twice));
        const std::byte* parts[] = {reinterpret_cast<const std::byte*>(b.data()), reinterpret_cast<const std::byte*>(c.data())};
        combine(DType::Float32, ReduceOp::Sum, out.data(), parts, count, 1);
        EXPECT(same(b));
        scale(DType::Float32, out.data(), a.data(), count, 2.0);
        EXPECT(same(twice));
        divide(DType::Float32, out.data(), count, 2);
        EXPECT(same(a));
        narrow(DType::BFloat16, half.data(), a.data(), count);
        EXPECT(half == narrowed && half[0] != 0);
        widen(DType::BFloat16, out.data(), half.data(), count);
        EXPECT(same(rough));
    };
    check();
    REQUIRE(std::fesetround(FE_UPWARD) == 0);
    check();
    EXPECT(std::fegetround() == FE_UPWARD);
    REQUIRE(std::fesetround(FE_TONEAREST) == 0);
#if defined(__x86_64__)
    const auto before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // as torch.set_flush_denormal(True)
    check();
    EXPECT((_mm_getcsr() & 0x8040) == 0x8040);
    _mm_setcsr(before);
#endif
}

FT_TEST(reduce_instruction_sets_agree) {
    // Same bits from each, NaNs apart: ranks on different CPUs may take over each other's segments.
    Random random(3);
    constexpr std::size_t count = 5000;
    for (auto dtype : dtypes())
        for (auto op : ops()) {
            if (!reduce_supported(dtype, op)) continue;
            Buffer a(dtype, count, 0), b(dtype, count, 0), first(dtype, count, 0), out(dtype, count, 0);
            fill(dtype, random, a.get(), count);
            fill(dtype, random, b.get(), count);
            baseline_reduce_kernels()->reduce(dtype, op, first.get(), a.get(), b.get(), count);
            for (const auto* kernels : available_reduce_kernels()) {
                kernels->reduce(dtype, op, out.get(), a.get(), b.get(), count);
                compare(to_string(op), *kernels, dtype, count, out.get(), first.get());
            }
        }
}

FT_TEST(reduce_supported_table) {
    const auto row = [](DType dtype) {
        std::string s;
        for (auto op : ops()) s += reduce_supported(dtype, op) ? '1' : '0';
        return s;
    };
    for (auto dtype : dtypes()) {
        const bool complex = dtype == DType::Complex64 || dtype == DType::Complex128;
        const std::string expected = dtype == DType::Bool         ? "101111110"
                                     : complex                    ? "111000001"
                                     : dtype <= DType::Float8E5M2 ? "111110001"
                                                                  : "111111110";
        EXPECT_EQ(row(dtype), expected);
        EXPECT(size_of(dtype) > 0);
    }
    EXPECT(!reduce_supported(static_cast<DType>(kDTypes), ReduceOp::Sum));
    EXPECT(!reduce_supported(DType::Float32, static_cast<ReduceOp>(kReduceOps)));
    EXPECT_EQ(size_of(static_cast<DType>(200)), 0u);
}

}  // namespace ftcomm
