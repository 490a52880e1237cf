// "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Gopal et al., Intel 2009, on 512 or 256 bits (which
// processors have without AVX-512, too, as do guests that it is hidden from).
//
// The message is a polynomial; a block of 128 bits that lies N bits before another may be added to it when it is multiplied by
// x^N modulo P: its halves are multiplied by x^(N + 64) and x^N, each reduced to 32 bits. What is left at the end are 16 bytes with
// the same remainder as the whole.
#include "base/crc32c_folding.h"

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace ftcomm {
namespace {

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

enum class Copy { None, Plain, Stream };

constexpr std::size_t kLine = 64;

namespace by_512 {

#define FTCOMM_FOLD_TARGET __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))
using Block = __m512i;

FTCOMM_FOLD_TARGET inline Block load(const unsigned char* p) { return _mm512_loadu_si512(p); }
FTCOMM_FOLD_TARGET inline void store(unsigned char* p, Block x) { _mm512_storeu_si512(p, x); }
FTCOMM_FOLD_TARGET inline void stream(unsigned char* p, Block x) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x); }
FTCOMM_FOLD_TARGET inline Block with_front(Block x, __m128i front) { return _mm512_xor_si512(x, _mm512_zextsi128_si512(front)); }
FTCOMM_FOLD_TARGET inline Block factors(long long high, long long low) {
    return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}
FTCOMM_FOLD_TARGET inline Block multiplied(Block x, Block by, Block onto) {
    // 0x96: the three, xored
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11), onto, 0x96);
}
FTCOMM_FOLD_TARGET inline __m128i fold_128(__m128i x, __m128i onto) {
    const auto by = _mm_set_epi64x(Factors<128>::high, Factors<128>::low);
    return _mm_ternarylogic_epi64(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11), onto, 0x96);
}
FTCOMM_FOLD_TARGET inline __m128i last_of(Block x) {
    // With a mask: without one, GCC 12 warns of its own header.
    const auto two = fold_128(_mm512_maskz_extracti32x4_epi32(0xf, x, 0), _mm512_maskz_extracti32x4_epi32(0xf, x, 1));
    return fold_128(fold_128(two, _mm512_maskz_extracti32x4_epi32(0xf, x, 2)), _mm512_maskz_extracti32x4_epi32(0xf, x, 3));
}

#include "base/crc32c_folding.inc"
#undef FTCOMM_FOLD_TARGET

}  // namespace by_512

namespace by_256 {

// 512 bits at once are as fast as memory without that.
#define FTCOMM_BRAID
#define FTCOMM_FOLD_TARGET __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))
using Block = __m256i;

FTCOMM_FOLD_TARGET inline Block load(const unsigned char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
FTCOMM_FOLD_TARGET inline void store(unsigned char* p, Block x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
FTCOMM_FOLD_TARGET inline void stream(unsigned char* p, Block x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
FTCOMM_FOLD_TARGET inline Block with_front(Block x, __m128i front) { return _mm256_xor_si256(x, _mm256_zextsi128_si256(front)); }
FTCOMM_FOLD_TARGET inline Block factors(long long high, long long low) { return _mm256_set_epi64x(high, low, high, low); }
FTCOMM_FOLD_TARGET inline Block multiplied(Block x, Block by, Block onto) {
    return _mm256_xor_si256(_mm256_xor_si256(_mm256_clmulepi64_epi128(x, by, 0x00), _mm256_clmulepi64_epi128(x, by, 0x11)), onto);
}
FTCOMM_FOLD_TARGET inline __m128i last_of(Block x) {
    const auto by = _mm_set_epi64x(Factors<128>::high, Factors<128>::low);
    const auto low = _mm256_castsi256_si128(x);
    const auto product = _mm_xor_si128(_mm_clmulepi64_si128(low, by, 0x00), _mm_clmulepi64_si128(low, by, 0x11));
    return _mm_xor_si128(product, _mm256_extracti128_si256(x, 1));
}

#include "base/crc32c_folding.inc"
#undef FTCOMM_BRAID
#undef FTCOMM_FOLD_TARGET

}  // namespace by_256

bool can_fold() {
    return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
}

}  // namespace

const Folding* crc32c_folding_by(int bits) {
    static const bool has_512 = can_fold() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
    static const bool has_256 = can_fold() && __builtin_cpu_supports("avx2");
    if (bits == 512) return has_512 ? &by_512::kFolding : nullptr;
    return bits == 256 && has_256 ? &by_256::kFolding : nullptr;
}

}  // namespace ftcomm

#else

namespace ftcomm {

const Folding* crc32c_folding_by(int) { return nullptr; }

}  // namespace ftcomm

#endif

namespace ftcomm {

const Folding* crc32c_folding() {
    static const auto* widest = crc32c_folding_by(512) != nullptr ? crc32c_folding_by(512) : crc32c_folding_by(256);
    return widest;
}

}  // namespace ftcomm
