// Slow, obvious definitions that the kernels are compared with. They share nothing with base/float_codec.h: a value is
// decoded by its formula, and encoded by looking for the nearest one.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace ftcomm::test {

struct Format {
    int bits;           // all of them
    int mantissa;       // stored bits of it
    int bias;
    bool has_infinity;  // false: only all ones is NaN, the rest of the highest exponent are numbers
};
inline constexpr Format kFloat16{16, 10, 15, true};
inline constexpr Format kBFloat16{16, 7, 127, true};
inline constexpr Format kFloat8E4M3{8, 3, 7, false};
inline constexpr Format kFloat8E5M2{8, 2, 15, true};

double decode(const Format& format, std::uint32_t value);
std::uint32_t encode(const Format& format, double value);  // not for NaN

// One element of `dtype` at `out` from those at a and b. Only for supported combinations.
void reduce_one(DType dtype, ReduceOp op, void* out, const void* a, const void* b);
void divide_one(DType dtype, void* element, std::uint32_t divisor);
void scale_one(DType dtype, void* out, const void* in, double factor);

// Same bits, or both NaN (in each component of a complex number).
bool same_element(DType dtype, const void* a, const void* b);

}  // namespace ftcomm::test
