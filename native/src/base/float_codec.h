// Small floats to float32 and back, one element at a time, without branches so that loops over them vectorise.
// Rounding is to nearest even, as torch's c10 conversions do. Subnormals are handled in integers or by additions whose
// results are normal, so flush-to-zero modes (torch.set_flush_denormal) change nothing.
// Internal linkage on purpose: these are compiled once per instruction set and must not be merged by the linker.
#pragma once

#include <cstdint>

#define FTCOMM_CODEC static inline __attribute__((always_inline))

namespace ftcomm::codec {

FTCOMM_CODEC std::uint32_t bits_of(float f) { return __builtin_bit_cast(std::uint32_t, f); }
FTCOMM_CODEC float float_of(std::uint32_t u) { return __builtin_bit_cast(float, u); }

FTCOMM_CODEC float decode_bfloat16(std::uint16_t v) { return float_of(static_cast<std::uint32_t>(v) << 16); }

FTCOMM_CODEC std::uint16_t encode_bfloat16(float f) {
    const std::uint32_t u = bits_of(f);
    const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

FTCOMM_CODEC float decode_float16(std::uint16_t v) {
    const std::uint32_t magnitude = v & 0x7fffu;
    const std::uint32_t sign = static_cast<std::uint32_t>(v & 0x8000u) << 16;
    std::uint32_t u = (magnitude << 13) + (112u << 23);
    u = magnitude >= 0x7c00u ? u + (112u << 23) : u;    // infinity and NaN: exponent 255
    u = magnitude > 0x7c00u ? u | 0x400000u : u;        // quiet, as F16C
    const std::uint32_t subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    return float_of((magnitude < 0x0400u ? subnormal : u) | sign);
}

FTCOMM_CODEC std::uint16_t encode_float16(float f) {
    const std::uint32_t u = bits_of(f);
    const std::uint32_t m = u & 0x7fffffffu;
    const std::uint32_t sign = (u >> 16) & 0x8000u;
    // Below 2^-14: adding 0.5 makes the FPU round at 2^-24, the step of the subnormals.
    const std::uint32_t small = bits_of(float_of(m) + 0.5f) - (126u << 23);
    const std::uint32_t normal = (m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
    const std::uint32_t nan = 0x7e00u | ((m >> 13) & 0x3ffu);
    std::uint32_t r = m < (113u << 23) ? small : normal;
    r = m >= (143u << 23) ? 0x7c00u : r;
    r = m > 0x7f800000u ? nan : r;
    return static_cast<std::uint16_t>(r | sign);
}

FTCOMM_CODEC float decode_float8_e4m3(std::uint8_t v) {
    const std::uint32_t magnitude = v & 0x7fu;
    const std::uint32_t sign = static_cast<std::uint32_t>(v & 0x80u) << 24;
    const std::uint32_t normal = (magnitude << 20) + (120u << 23);
    const std::uint32_t subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
    std::uint32_t u = magnitude < 8u ? subnormal : normal;
    u = magnitude == 0x7fu ? 0x7fc00000u : u;
    return float_of(u | sign);
}

FTCOMM_CODEC std::uint8_t encode_float8_e4m3(float f) {
    const std::uint32_t u = bits_of(f);
    const std::uint32_t m = u & 0x7fffffffu;
    const std::uint32_t sign = (u >> 24) & 0x80u;
    const std::uint32_t small = bits_of(float_of(m) + 0x1p14f) - (141u << 23);  // rounds at 2^-9
    const std::uint32_t normal = (m - (120u << 23) + 0x7ffffu + ((m >> 20) & 1u)) >> 20;
    std::uint32_t r = m < (121u << 23) ? small : normal;
    r = m >= (1087u << 20) ? 0x7fu : r;  // 480 and above, infinity and NaN: the format has no infinity
    return static_cast<std::uint8_t>(r | sign);
}

// float8_e5m2 is the upper byte of a float16.
FTCOMM_CODEC float decode_float8_e5m2(std::uint8_t v) {
    return decode_float16(static_cast<std::uint16_t>(static_cast<std::uint32_t>(v) << 8));
}

FTCOMM_CODEC std::uint8_t encode_float8_e5m2(float f) {
    const std::uint32_t u = bits_of(f);
    const std::uint32_t m = u & 0x7fffffffu;
    const std::uint32_t sign = (u >> 24) & 0x80u;
    const std::uint32_t small = bits_of(float_of(m) + 0x1p7f) - (134u << 23);  // rounds at 2^-16
    const std::uint32_t normal = (m - (112u << 23) + 0xfffffu + ((m >> 21) & 1u)) >> 21;
    std::uint32_t r = m < (113u << 23) ? small : normal;
    r = m >= (143u << 23) ? 0x7cu : r;
    r = m > 0x7f800000u ? 0x7fu : r;
    return static_cast<std::uint8_t>(r | sign);
}

}  // namespace ftcomm::codec
