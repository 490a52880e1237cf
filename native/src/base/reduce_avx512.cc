#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define FTCOMM_ISA avx512
#include "base/f16c.h"
#include "base/reduce_kernels.inc"

namespace ftcomm {

const ReduceKernels* avx512_reduce_kernels() {
    static constexpr ReduceKernels kernels{"avx512",      avx512::reduce, avx512::divide,
                                           avx512::scale, avx512::widen,  avx512::narrow};
    const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_f16c();
    return runs ? &kernels : nullptr;
}

}  // namespace ftcomm
#else
#include "base/reduce_kernels.h"

namespace ftcomm {

const ReduceKernels* avx512_reduce_kernels() { return nullptr; }

}  // namespace ftcomm
#endif
