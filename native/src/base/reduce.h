// Reduction kernels: the only place where element values are looked at. Whatever a thread has set for its floats, they go by the same rules
// (base/float_rules.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace ftcomm {

// Whether op is defined for dtype (bool: sum and max are logical or, product and min logical and; complex: no min, max,
// bitwise; floats: no bitwise; avg on integers truncates toward zero as torch does; premul_sum: floats and complex only).
bool reduce_supported(DType dtype, ReduceOp op);

// Added in float32 and rounded: the 8- and 16-bit floats.
bool is_narrow_float(DType dtype);
void widen(DType dtype, float* dst, const void* src, std::size_t count);
void narrow(DType dtype, void* dst, const float* src, std::size_t count);  // to the nearest even

// dst[i] = op(a[i], b[i]) for count elements; dst may be a or b, no other overlap; pointers need no alignment.
// Avg and PremulSum add. 16-bit and 8-bit floats are added in float32 and rounded once (nearest even).
void reduce(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, std::size_t count);
// The same, then divided (1: not): the last addition of an average. What is added in float32 is rounded after that, and once.
void reduce(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, std::size_t count, std::uint32_t divisor);

// buffer[i] /= divisor: the end of an average, applied once by the segment's owner before the value is final.
void divide(DType dtype, void* buffer, std::size_t count, std::uint32_t divisor);

// dst[i] = src[i] * factor: the start of premul_sum. dst may be src.
void scale(DType dtype, void* dst, const void* src, std::size_t count, double factor);

// dst = op over `parts` inputs that lie one after another from `first`, in their order, then divided (1: not). 8- and 16-bit floats
// stay in float32 from the first input to the division and are rounded once, at the end. dst may be the first input.
void combine(DType dtype, ReduceOp op, void* dst, const void* first, std::size_t parts, std::size_t count, std::uint32_t divisor);
// The same of inputs that lie anywhere. `also`, if it is given, gets it, too, while it is in the first-level cache; it may be one of them.
void combine(DType dtype, ReduceOp op, void* dst, std::span<const std::byte* const> inputs, std::size_t count,
             std::uint32_t divisor, void* also = nullptr);

}  // namespace ftcomm
