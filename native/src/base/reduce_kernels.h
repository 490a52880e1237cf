// The reduction kernels of one instruction set; reduce.cc picks one at start, tests go through all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace ftcomm {

// Same contracts as in reduce.h, for supported combinations only (reduce.cc checks).
struct ReduceKernels {
    const char* name;
    void (*reduce)(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, std::size_t count);
    void (*divide)(DType dtype, void* buffer, std::size_t count, std::uint32_t divisor);
    void (*scale)(DType dtype, void* dst, const void* src, std::size_t count, double factor);
    // 8- and 16-bit floats to and from float32, to the nearest, ties to even.
    void (*widen)(DType dtype, float* dst, const void* src, std::size_t count);
    void (*narrow)(DType dtype, void* dst, const float* src, std::size_t count);
};

// nullptr: not built for this architecture, or this CPU cannot run it. Baseline always exists.
const ReduceKernels* baseline_reduce_kernels();
const ReduceKernels* avx2_reduce_kernels();
const ReduceKernels* avx512_reduce_kernels();

// Those that run here, the one in use last.
std::vector<const ReduceKernels*> available_reduce_kernels();
const ReduceKernels& reduce_kernels();

}  // namespace ftcomm
