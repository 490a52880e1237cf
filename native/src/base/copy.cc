#include "base/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ftcomm {

#if defined(__x86_64__)
namespace {

// 64 bytes at a time, from where the destination is at a multiple of so many.
template <std::size_t aligned, class Store>
void copy_in_lines(void* to, const void* from, std::size_t bytes, Store store) {
    auto* out = static_cast<unsigned char*>(to);
    const auto* in = static_cast<const unsigned char*>(from);
    const std::size_t before = -reinterpret_cast<std::uintptr_t>(out) & (aligned - 1);
    if (bytes >= before + 64) {
        std::memcpy(out, in, before);
        out += before;
        in += before;
        bytes -= before;
        for (; bytes >= 64; out += 64, in += 64, bytes -= 64) {
            const auto* words = reinterpret_cast<const __m128i*>(in);
            const auto a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1);
            const auto c = _mm_loadu_si128(words + 2), d = _mm_loadu_si128(words + 3);
            auto* line = reinterpret_cast<__m128i*>(out);
            store(line, a);
            store(line + 1, b);
            store(line + 2, c);
            store(line + 3, d);
        }
    }
    std::memcpy(out, in, bytes);
}

}  // namespace

void copy_past_cache(void* to, const void* from, std::size_t bytes) {
    // Whole lines: parts of one would be read after all.
    copy_in_lines<64>(to, from, bytes, [](__m128i* line, __m128i word) { _mm_stream_si128(line, word); });
    _mm_sfence();  // these stores are not ordered by themselves
}

void copy_by_vectors(void* to, const void* from, std::size_t bytes) {
    copy_in_lines<sizeof(__m128i)>(to, from, bytes, [](__m128i* line, __m128i word) { _mm_store_si128(line, word); });
}

#else

void copy_past_cache(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void copy_by_vectors(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace ftcomm
