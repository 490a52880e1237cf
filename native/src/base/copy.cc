#include "base/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ftcomm {

void copy_past_cache(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__)
    auto* out = static_cast<unsigned char*>(to);
    const auto* in = static_cast<const unsigned char*>(from);
    const std::size_t before = -reinterpret_cast<std::uintptr_t>(out) & 63u;  // whole lines: parts of one would be read after all
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
            _mm_stream_si128(line, a);
            _mm_stream_si128(line + 1, b);
            _mm_stream_si128(line + 2, c);
            _mm_stream_si128(line + 3, d);
        }
        _mm_sfence();  // these stores are not ordered by themselves
    }
    std::memcpy(out, in, bytes);
#else
    std::memcpy(to, from, bytes);
#endif
}

void copy_by_vectors(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__)
    auto* out = static_cast<unsigned char*>(to);
    const auto* in = static_cast<const unsigned char*>(from);
    const std::size_t before = -reinterpret_cast<std::uintptr_t>(out) & 15u;
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
            _mm_store_si128(line, a);
            _mm_store_si128(line + 1, b);
            _mm_store_si128(line + 2, c);
            _mm_store_si128(line + 3, d);
        }
    }
    std::memcpy(out, in, bytes);
#else
    std::memcpy(to, from, bytes);
#endif
}

}  // namespace ftcomm
