#include "base/crc32c.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/copy.h"
#include "base/crc32c_folding.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#define FTCOMM_CRC_INSTRUCTION
#define FTCOMM_CRC_TARGET
#elif defined(__x86_64__)
#define FTCOMM_CRC_INSTRUCTION
#define FTCOMM_CRC_TARGET __attribute__((target("sse4.2")))
#endif

namespace ftcomm {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // reflected

using Table = std::array<std::uint32_t, 256>;

// kTables[k][b]: the register after byte b and k zero bytes.
constexpr auto kTables = [] {
    std::array<Table, 8> tables{};
    for (std::uint32_t b = 0; b < 256; ++b) {
        std::uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = (crc & 1u) != 0 ? (crc >> 1) ^ kPolynomial : crc >> 1;
        tables[0][b] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t b = 0; b < 256; ++b) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xffu];
    return tables;
}();

template <class T>
T load(const unsigned char* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

#ifdef FTCOMM_CRC_INSTRUCTION

// The instruction takes 3 cycles and one can start every cycle: three stretches of a block go side by side, and are put
// together with the operator "followed by kStretch zero bytes", which is linear: four lookups.
constexpr std::size_t kStretch = 1024;

constexpr auto kShift = [] {
    std::array<std::uint32_t, 32> basis{};
    for (std::size_t bit = 0; bit < 32; ++bit) {
        std::uint32_t crc = std::uint32_t{1} << bit;
        for (std::size_t i = 0; i < kStretch; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xffu];
        basis[bit] = crc;
    }
    std::array<Table, 4> shift{};
    for (std::size_t k = 0; k < 4; ++k)
        for (std::size_t b = 0; b < 256; ++b)
            for (std::size_t bit = 0; bit < 8; ++bit)
                if ((b >> bit & 1u) != 0) shift[k][b] ^= basis[8 * k + bit];
    return shift;
}();

std::uint32_t shifted(std::uint32_t crc) {
    return kShift[0][crc & 0xffu] ^ kShift[1][crc >> 8 & 0xffu] ^ kShift[2][crc >> 16 & 0xffu] ^ kShift[3][crc >> 24];
}

FTCOMM_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, const unsigned char* p) {
#ifdef __x86_64__
    return static_cast<std::uint32_t>(__builtin_ia32_crc32di(crc, load<std::uint64_t>(p)));
#else
    // arm_acle.h has it for those only who compile for no other processor.
    asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(load<std::uint64_t>(p)));
    return crc;
#endif
}

FTCOMM_CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, const unsigned char* p) {
#ifdef __x86_64__
    return __builtin_ia32_crc32qi(crc, *p);
#else
    asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(std::uint32_t{*p}));
    return crc;
#endif
}

constexpr std::size_t kWorthFolding = 512;

const Folding* folding_for(std::size_t size) { return size >= kWorthFolding ? crc32c_folding() : nullptr; }

FTCOMM_CRC_TARGET std::uint32_t with_instruction(const unsigned char* p, std::size_t size, std::uint32_t crc) {
    for (; size >= 3 * kStretch; p += 3 * kStretch, size -= 3 * kStretch) {
        std::uint32_t second = 0, third = 0;
        for (std::size_t i = 0; i < kStretch; i += 8) {
            crc = step8(crc, p + i);
            second = step8(second, p + kStretch + i);
            third = step8(third, p + 2 * kStretch + i);
        }
        crc = shifted(shifted(crc) ^ second) ^ third;
    }
    for (; size >= 8; p += 8, size -= 8) crc = step8(crc, p);
    for (; size > 0; ++p, --size) crc = step1(crc, p);
    return crc;
}

bool has_instruction() {
#ifdef __x86_64__
    static const bool has = __builtin_cpu_supports("sse4.2");
#else
    static const bool has = (getauxval(AT_HWCAP) & (1u << 7)) != 0;  // HWCAP_CRC32: optional in ARMv8.0
#endif
    return has;
}

#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t seed) {
    const auto* p = static_cast<const unsigned char*>(data);
    std::uint32_t crc = ~seed;
    for (; size >= 8; p += 8, size -= 8) {
        const std::uint64_t word = load<std::uint64_t>(p) ^ crc;
        crc = 0;
        for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xffu];
    }
    for (; size > 0; ++p, --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xffu];
    return ~crc;
}

std::uint32_t crc32c_copy(void* to, const void* from, std::size_t size, std::uint32_t seed, Into into) {
    auto* out = static_cast<unsigned char*>(to);
    const auto* p = static_cast<const unsigned char*>(from);
#ifdef FTCOMM_CRC_INSTRUCTION
    if (const auto* folding = folding_for(size)) {
        auto crc = ~seed;
        if (into == Into::Memory) {  // whole lines: a part of one would be read first
            const auto before = -reinterpret_cast<std::uintptr_t>(out) & 63u;
            std::memcpy(out, p, before);
            crc = with_instruction(out, before, crc);
            out += before;
            p += before;
            size -= before;
        }
        const auto folded = size & ~std::size_t{63};
        crc = (into == Into::Memory ? folding->copy_past_caches : folding->copy)(out, p, folded, crc);
        std::memcpy(out + folded, p + folded, size - folded);
        return ~with_instruction(out + folded, size - folded, crc);
    }
    if (size == 0) return seed;  // of no memory, perhaps
    if (size < kWorthFolding && has_instruction()) {  // a few lines: they go through the caches, wherever they are to be
        std::memcpy(out, p, size);
        return ~with_instruction(out, size, ~seed);
    }
#endif
    return crc32c_copy_portable(out, p, size, seed, into);
}

std::uint32_t crc32c_copy_portable(void* to, const void* from, std::size_t size, std::uint32_t seed, Into into) {
    constexpr std::size_t kPiece = 16u << 10;  // stays in the first-level cache
    auto* out = static_cast<unsigned char*>(to);
    const auto* p = static_cast<const unsigned char*>(from);
    unsigned char between[kPiece];
    for (std::size_t n = 0; size > 0; out += n, p += n, size -= n) {
        n = std::min(kPiece, size);
        auto* copied = into == Into::Memory ? between : out;
        std::memcpy(copied, p, n);
        seed = crc32c(copied, n, seed);
        if (into == Into::Memory) copy_past_cache(out, between, n);
    }
    return seed;
}

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t seed) {
#ifdef FTCOMM_CRC_INSTRUCTION
    const auto* p = static_cast<const unsigned char*>(data);
    if (const auto* folding = folding_for(size)) {
        const auto folded = size & ~std::size_t{63};
        return ~with_instruction(p + folded, size - folded, folding->sum(p, folded, ~seed));
    }
    if (has_instruction()) return ~with_instruction(p, size, ~seed);
#endif
    return crc32c_portable(data, size, seed);
}

namespace {

// Polynomials modulo the generator, reflected: bit 31 is x^0.
constexpr std::uint32_t multiplied(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = (b & 1u) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
    }
    return product;
}

// kBytes[k]: x to the number of bits in 2^k bytes.
constexpr auto kBytes = [] {
    std::array<std::uint32_t, 64> powers{};
    powers[0] = 1u << 23;
    for (std::size_t k = 1; k < powers.size(); ++k) powers[k] = multiplied(powers[k - 1], powers[k - 1]);
    return powers;
}();

}  // namespace

// The register after the first part goes through as many zero bytes as the second has (as zlib's crc32_combine).
std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::size_t second_size) {
    for (std::size_t k = 0; second_size != 0; ++k, second_size >>= 1)
        if ((second_size & 1u) != 0) first = multiplied(kBytes[k], first);
    return first ^ second;
}

std::string crc_text(std::uint32_t crc) {
    char text[12];
    std::snprintf(text, sizeof text, "%08x", crc);
    return text;
}

}  // namespace ftcomm
