#define FTCOMM_ISA baseline
#include "base/reduce_kernels.inc"

namespace ftcomm {

const ReduceKernels* baseline_reduce_kernels() {
    static constexpr ReduceKernels kernels{"baseline",      baseline::reduce, baseline::divide,
                                           baseline::scale, baseline::widen,  baseline::narrow};
    return &kernels;
}

}  // namespace ftcomm
