// How far the reduction kernels are from what memory gives: a plain copy and a plain a + b in the same process.
//   bench_reduce [BYTES]   (of each buffer; 64 MiB, and 256 KiB for cache speed, when not given)
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/reduce_kernels.h"

using namespace ftcomm;

namespace {

// Best of several: GB/s of `bytes` moved by one call.
template <class F>
double speed(std::size_t bytes, F f) {
    const int inner = static_cast<int>(std::max<std::size_t>(1, (std::size_t{64} << 20) / bytes));
    double best = 0;
    f();
    for (int round = 0; round < 7; ++round) {
        const auto start = monotonic_ns();
        for (int i = 0; i < inner; ++i) f();
        best = std::max(best, static_cast<double>(bytes) * inner / static_cast<double>(monotonic_ns() - start));
    }
    return best;
}

void measure(std::size_t size) {
    std::vector<char> a(size, 0), b(size, 0), c(size, 0);
    std::printf("buffers of %zu KiB; GB/s of bytes read and written\n", size >> 10);
    std::printf("  %-28s %6.1f\n", "memcpy (r+w)", speed(2 * size, [&] { std::memcpy(c.data(), a.data(), size); }));
    std::printf("  %-28s %6.1f\n", "crc32c (r)", speed(size, [&] {
                    if (crc32c(a.data(), size) == 1) std::puts("");  // so that it is not left out
                }));
    const DType dtypes[] = {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16, DType::Float8E4M3, DType::Float8E5M2,
                            DType::Int64,   DType::Int32,   DType::Int8,    DType::Bool,     DType::Complex64};
    for (const auto* kernels : available_reduce_kernels())
        for (auto dtype : dtypes) {
            const std::size_t count = size / size_of(dtype);
            char name[64];
            const auto row = [&](const char* what, std::size_t moved, auto f) {
                std::snprintf(name, sizeof name, "%s %s %s", kernels->name, to_string(dtype), what);
                std::printf("  %-28s %6.1f\n", name, speed(moved, f));
            };
            row("sum a+=b", 3 * size, [&] { kernels->reduce(dtype, ReduceOp::Sum, a.data(), a.data(), b.data(), count); });
            if (dtype == DType::Float32 || dtype == DType::BFloat16 || dtype == DType::Float16) {
                row("sum c=a+b", 3 * size, [&] { kernels->reduce(dtype, ReduceOp::Sum, c.data(), a.data(), b.data(), count); });
                row("divide", 2 * size, [&] { kernels->divide(dtype, a.data(), count, 3); });
            }
            if (dtype == DType::Float32)
                row("max", 3 * size, [&] { kernels->reduce(dtype, ReduceOp::Max, a.data(), a.data(), b.data(), count); });
            if (dtype == DType::Complex64)
                row("product", 3 * size, [&] { kernels->reduce(dtype, ReduceOp::Product, a.data(), a.data(), b.data(), count); });
        }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1) {
        const auto size = std::strtoull(argv[1], nullptr, 10);
        if (size < 64 || size > (1ull << 32)) return std::fprintf(stderr, "bench_reduce: BYTES must be 64 to 2^32\n"), 2;
        measure(size);
    } else {
        measure(std::size_t{256} << 10);
        measure(std::size_t{64} << 20);
    }
}
