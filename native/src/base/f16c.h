// Whether the processor converts halves in hardware. Asked of it directly: Clang's __builtin_cpu_supports does not know the name.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace ftcomm {

inline bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace ftcomm
#endif
