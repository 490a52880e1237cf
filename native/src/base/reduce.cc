#include "base/reduce.h"

#include <algorithm>

#include "base/check.h"
#include "base/copy.h"
#include "base/float_rules.h"
#include "base/reduce_kernels.h"

namespace ftcomm {

bool reduce_supported(DType dtype, ReduceOp op) {
    if (static_cast<int>(dtype) >= kDTypes || static_cast<int>(op) >= kReduceOps) return false;
    const bool complex = dtype == DType::Complex64 || dtype == DType::Complex128;
    const bool floating = dtype <= DType::Float8E5M2;
    switch (op) {
        case ReduceOp::Sum:
        case ReduceOp::Product: return true;
        case ReduceOp::Avg: return dtype != DType::Bool;
        case ReduceOp::Min:
        case ReduceOp::Max: return !complex;
        case ReduceOp::BAnd:
        case ReduceOp::BOr:
        case ReduceOp::BXor: return !complex && !floating;
        case ReduceOp::PremulSum: return complex || floating;
    }
    return false;
}

std::vector<const ReduceKernels*> available_reduce_kernels() {
    std::vector<const ReduceKernels*> out;
    for (const auto* kernels : {baseline_reduce_kernels(), avx2_reduce_kernels(), avx512_reduce_kernels()})
        if (kernels != nullptr) out.push_back(kernels);
    return out;
}

const ReduceKernels& reduce_kernels() {
    static const ReduceKernels& best = *available_reduce_kernels().back();
    return best;
}

void reduce(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, std::size_t count) {
    FT_CHECK(reduce_supported(dtype, op), "%s of %s", to_string(op), to_string(dtype));
    const FloatRules rules;
    reduce_kernels().reduce(dtype, op, dst, a, b, count);
}

void divide(DType dtype, void* buffer, std::size_t count, std::uint32_t divisor) {
    FT_CHECK(reduce_supported(dtype, ReduceOp::Avg), "avg of %s", to_string(dtype));
    FT_CHECK(divisor > 0, "an average over no contributor");
    const FloatRules rules;
    reduce_kernels().divide(dtype, buffer, count, divisor);
}

void scale(DType dtype, void* dst, const void* src, std::size_t count, double factor) {
    FT_CHECK(reduce_supported(dtype, ReduceOp::PremulSum), "premul_sum of %s", to_string(dtype));
    const FloatRules rules;
    reduce_kernels().scale(dtype, dst, src, count, factor);
}

bool is_narrow_float(DType dtype) {
    return dtype == DType::Float16 || dtype == DType::BFloat16 || dtype == DType::Float8E4M3 || dtype == DType::Float8E5M2;
}

void widen(DType dtype, float* dst, const void* src, std::size_t count) {
    FT_CHECK(is_narrow_float(dtype), "%s in float32", to_string(dtype));
    const FloatRules rules;
    reduce_kernels().widen(dtype, dst, src, count);
}

void narrow(DType dtype, void* dst, const float* src, std::size_t count) {
    FT_CHECK(is_narrow_float(dtype), "%s in float32", to_string(dtype));
    const FloatRules rules;
    reduce_kernels().narrow(dtype, dst, src, count);
}

namespace {

// A block of each input after the other, so that what is there of the result stays in the first-level cache.
template <class Part>
void combine_parts(DType dtype, ReduceOp op, void* dst, const Part& part, std::size_t parts, std::size_t count,
                   std::uint32_t divisor, void* also = nullptr) {
    FT_CHECK(parts > 0 && divisor > 0, "a reduction of %zu inputs, divided by %u", parts, divisor);
    FT_CHECK(reduce_supported(dtype, op), "%s of %s", to_string(op), to_string(dtype));
    const FloatRules rules;
    const auto& kernels = reduce_kernels();
    const auto size = size_of(dtype);
    auto* out = static_cast<std::byte*>(dst);
    const auto is_made = [&](std::size_t offset, std::size_t bytes) {
        if (also != nullptr) copy_bytes(static_cast<std::byte*>(also) + offset, out + offset, bytes);
    };
    if (!is_narrow_float(dtype)) {
        constexpr std::size_t kBlockBytes = 8u << 10;
        const auto block = kBlockBytes / size;
        for (std::size_t at = 0; at < count; at += block) {
            const auto n = std::min(block, count - at);
            auto* to = out + at * size;
            if (parts == 1 && to != part(0) + at * size) copy_bytes(to, part(0) + at * size, n * size);
            for (std::size_t k = 1; k < parts; ++k)
                kernels.reduce(dtype, op, to, k == 1 ? part(0) + at * size : to, part(k) + at * size, n);
            if (divisor != 1) kernels.divide(dtype, to, n, divisor);
            is_made(at * size, n * size);
        }
        return;
    }
    constexpr std::size_t kBlock = 1024;
    float sum[kBlock], next[kBlock];
    for (std::size_t at = 0; at < count; at += kBlock) {
        const auto n = std::min(kBlock, count - at);
        const auto offset = at * size;
        kernels.widen(dtype, sum, part(0) + offset, n);
        for (std::size_t k = 1; k < parts; ++k) {
            kernels.widen(dtype, next, part(k) + offset, n);
            kernels.reduce(DType::Float32, op, sum, sum, next, n);
        }
        if (divisor != 1) kernels.divide(DType::Float32, sum, n, divisor);
        kernels.narrow(dtype, out + offset, sum, n);
        is_made(offset, n * size);
    }
}

}  // namespace

void reduce(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, std::size_t count, std::uint32_t divisor) {
    if (divisor == 1) return reduce(dtype, op, dst, a, b, count);
    combine_parts(
        dtype, op, dst, [&](std::size_t k) { return static_cast<const std::byte*>(k == 0 ? a : b); }, 2, count, divisor);
}

void combine(DType dtype, ReduceOp op, void* dst, const void* first, std::size_t parts, std::size_t count,
             std::uint32_t divisor) {
    const auto bytes = count * size_of(dtype);
    const auto* from = static_cast<const std::byte*>(first);
    combine_parts(dtype, op, dst, [&](std::size_t k) { return from + k * bytes; }, parts, count, divisor);
}

void combine(DType dtype, ReduceOp op, void* dst, std::span<const std::byte* const> inputs, std::size_t count,
             std::uint32_t divisor, void* also) {
    combine_parts(dtype, op, dst, [&](std::size_t k) { return inputs[k]; }, inputs.size(), count, divisor, also);
}

}  // namespace ftcomm
