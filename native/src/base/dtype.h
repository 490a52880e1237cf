// Element types and reduction operators. The values are part of the C ABI and of signatures: never renumber.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ftcomm {

enum class DType : std::uint8_t {
    Float64 = 0,
    Float32 = 1,
    Float16 = 2,
    BFloat16 = 3,
    Float8E4M3 = 4,
    Float8E5M2 = 5,
    Int8 = 6,
    Int16 = 7,
    Int32 = 8,
    Int64 = 9,
    UInt8 = 10,
    UInt16 = 11,
    UInt32 = 12,
    UInt64 = 13,
    Bool = 14,
    Complex64 = 15,
    Complex128 = 16,
};
inline constexpr int kDTypes = 17;

enum class ReduceOp : std::uint8_t {
    Sum = 0,
    Avg = 1,
    Product = 2,
    Min = 3,
    Max = 4,
    BAnd = 5,
    BOr = 6,
    BXor = 7,
    PremulSum = 8
};
inline constexpr int kReduceOps = 9;

std::size_t size_of(DType dtype);
const char* to_string(DType dtype);
const char* to_string(ReduceOp op);

}  // namespace ftcomm
