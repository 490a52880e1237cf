#if defined(__AVX2__) && defined(__F16C__)
#define FTCOMM_ISA avx2
#include "base/f16c.h"
#include "base/reduce_kernels.inc"

namespace ftcomm {

const ReduceKernels* avx2_reduce_kernels() {
    static constexpr ReduceKernels kernels{"avx2", avx2::reduce, avx2::divide, avx2::scale, avx2::widen, avx2::narrow};
    return __builtin_cpu_supports("avx2") && has_f16c() ? &kernels : nullptr;
}

}  // namespace ftcomm
#else
#include "base/reduce_kernels.h"

namespace ftcomm {

const ReduceKernels* avx2_reduce_kernels() { return nullptr; }

}  // namespace ftcomm
#endif
