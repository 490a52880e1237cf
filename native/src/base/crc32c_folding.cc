// "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Gopal et al., Intel 2009, on 512 bits.
//
// The message is a polynomial; a block of 128 bits that lies N bits before another may be added to it when it is multiplied by
// x^N modulo P: its halves are multiplied by x^(N + 64) and x^N, each reduced to 32 bits. What is left at the end are 16 bytes with
// the same remainder as the whole.
#include "base/crc32c_folding.h"

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

namespace ftcomm {
namespace {

#define FTCOMM_FOLD_TARGET __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))

// x^n modulo P in bit-reversed order, at the place in 64 bits where the product of two reversed numbers comes out right.
constexpr long long power(int n) {
    std::uint32_t r = 0x80000000u;
    for (int i = 0; i < n; ++i) r = (r & 1u) != 0 ? (r >> 1) ^ 0x82f63b78u : r >> 1;
    return static_cast<long long>(std::uint64_t{r} << 1);
}

// Factors for a distance of N bits. 32 less than the halves' places say: the CRC instruction, which comes last, multiplies by x^32.
template <int N>
struct Factors {
    static constexpr long long low = power(N + 32), high = power(N - 32);
};

template <int N>
FTCOMM_FOLD_TARGET inline __m512i fold(__m512i x, __m512i onto) {
    const auto k = _mm512_set_epi64(Factors<N>::high, Factors<N>::low, Factors<N>::high, Factors<N>::low, Factors<N>::high,
                                    Factors<N>::low, Factors<N>::high, Factors<N>::low);
    // 0x96: the three, xored
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), onto, 0x96);
}

template <int N>
FTCOMM_FOLD_TARGET inline __m128i fold(__m128i x, __m128i onto) {
    const auto k = _mm_set_epi64x(Factors<N>::high, Factors<N>::low);
    return _mm_ternarylogic_epi64(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11), onto, 0x96);
}

enum class Copy { None, Plain, Stream };

// The next 64 bytes; they go to `out` on the way. Stream: past the caches, to whole lines.
template <Copy copy>
FTCOMM_FOLD_TARGET inline __m512i next(const unsigned char*& p, unsigned char*& out) {
    const auto x = _mm512_loadu_si512(p);
    p += 64;
    if constexpr (copy == Copy::Plain) _mm512_storeu_si512(out, x);
    if constexpr (copy == Copy::Stream) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), x);
    if constexpr (copy != Copy::None) out += 64;
    return x;
}

template <Copy copy>
FTCOMM_FOLD_TARGET std::uint32_t folded(unsigned char* out, const unsigned char* p, std::size_t size, std::uint32_t crc) {
    auto a = _mm512_xor_si512(next<copy>(p, out), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    auto b = next<copy>(p, out), c = next<copy>(p, out), d = next<copy>(p, out);
    size -= 256;
    for (; size >= 256; size -= 256) {
        a = fold<2048>(a, next<copy>(p, out));
        b = fold<2048>(b, next<copy>(p, out));
        c = fold<2048>(c, next<copy>(p, out));
        d = fold<2048>(d, next<copy>(p, out));
    }
    b = fold<512>(a, b);
    c = fold<512>(b, c);
    d = fold<512>(c, d);
    for (; size > 0; size -= 64) d = fold<512>(d, next<copy>(p, out));
    // With a mask: without one, GCC 12 warns of its own header.
    auto x = fold<128>(_mm512_maskz_extracti32x4_epi32(0xf, d, 0), _mm512_maskz_extracti32x4_epi32(0xf, d, 1));
    x = fold<128>(x, _mm512_maskz_extracti32x4_epi32(0xf, d, 2));
    x = fold<128>(x, _mm512_maskz_extracti32x4_epi32(0xf, d, 3));
    const auto first = _mm_crc32_u64(0, static_cast<unsigned long long>(_mm_cvtsi128_si64(x)));
    return static_cast<std::uint32_t>(_mm_crc32_u64(first, static_cast<unsigned long long>(_mm_extract_epi64(x, 1))));
}

}  // namespace

bool crc32c_folds() {
    static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul") &&
                            __builtin_cpu_supports("sse4.2");
    return has;
}

std::uint32_t crc32c_folded(const unsigned char* p, std::size_t size, std::uint32_t crc) {
    FT_CHECK(size >= 256 && size % 64 == 0, "%zu bytes", size);
    return folded<Copy::None>(nullptr, p, size, crc);
}

std::uint32_t crc32c_folded_copy(unsigned char* to, const unsigned char* p, std::size_t size, std::uint32_t crc) {
    FT_CHECK(size >= 256 && size % 64 == 0, "%zu bytes", size);
    return folded<Copy::Plain>(to, p, size, crc);
}

std::uint32_t crc32c_folded_stream(unsigned char* to, const unsigned char* p, std::size_t size, std::uint32_t crc) {
    FT_CHECK(size >= 256 && size % 64 == 0 && reinterpret_cast<std::uintptr_t>(to) % 64 == 0, "%zu bytes to %p", size,
             static_cast<void*>(to));
    const auto copied = folded<Copy::Stream>(to, p, size, crc);
    _mm_sfence();  // these stores are not ordered by themselves
    return copied;
}

}  // namespace ftcomm

#else

namespace ftcomm {

bool crc32c_folds() { return false; }
std::uint32_t crc32c_folded(const unsigned char*, std::size_t, std::uint32_t) { FT_CHECK(false, "not on this machine"); }
std::uint32_t crc32c_folded_copy(unsigned char*, const unsigned char*, std::size_t, std::uint32_t) {
    FT_CHECK(false, "not on this machine");
}
std::uint32_t crc32c_folded_stream(unsigned char*, const unsigned char*, std::size_t, std::uint32_t) {
    FT_CHECK(false, "not on this machine");
}

}  // namespace ftcomm

#endif
