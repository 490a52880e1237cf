// What belongs to no job: build, data types, failpoints.
#include <algorithm>
#include <cstddef>
#include <string>

#include "base/crc32c.h"
#include "base/dtype.h"
#include "base/failpoint.h"
#include "base/fault_tolerance.h"
#include "base/host_info.h"
#include "base/reduce.h"
#include "capi/handle.h"
#include "runtime/json.h"
#include "runtime/log_runs.h"

using namespace ftcomm;
using namespace ftcomm::capi;

#ifndef FTCOMM_VERSION
#define FTCOMM_VERSION "0"
#endif

extern "C" {

size_t ft_dtype_size(int32_t dtype) { return dtype >= 0 && dtype < kDTypes ? size_of(static_cast<DType>(dtype)) : 0; }

int ft_reduce_supported(int32_t dtype, int32_t op) {
    return dtype >= 0 && dtype < kDTypes && op >= 0 && op < kReduceOps &&
           reduce_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
}

uint32_t ft_crc32c(const void* data, uint64_t bytes, uint32_t seed) { return crc32c(data, bytes, seed); }

uint32_t ft_sample(const void* const* data, const size_t* bytes, size_t count) {
    constexpr size_t kLine = 64;
    auto sum = crc32c(bytes, count * sizeof *bytes, 0);
    for (size_t i = 0; i < count; ++i) {
        const auto n = data[i] != nullptr ? std::min(bytes[i], kLine) : 0;  // whose storage has been freed
        const auto* const first = static_cast<const std::byte*>(data[i]);
        if (n > 0) sum = crc32c(first + bytes[i] - n, n, crc32c(first, n, sum));
    }
    return sum;
}

const char* ft_version(void) { return kFaultTolerant ? FTCOMM_VERSION : FTCOMM_VERSION "+without.fault.tolerance"; }

const char* ft_build_info(void) {
    static const std::string info = [] {
        Json j;
        j.begin().key("version").text(ft_version()).key("compiler").text(__VERSION__);
        j.key("transports").begin_list().text("shm").text("tcp").end_list();
        j.key("fault_tolerance").text(kFaultTolerant ? "yes" : "compiled out: a library for benchmarks");
        j.key("host").raw(to_json(probe_host())).end();
        return j.str();
    }();
    return info.c_str();
}

const char* ft_fault_points(void) {
    static const std::string points = [] {
        Json j;
        j.begin_list();
        std::size_t n = 0;
        const auto* p = fault::all_points(&n);
        for (std::size_t i = 0; i < n; ++i) j.begin().key("name").text(p[i].name).key("where").text(p[i].where).end();
        j.end_list();
        return j.str();
    }();
    return points.c_str();
}

void ft_fault_step(uint64_t step) {
    if (fault::armed.load(std::memory_order_relaxed)) fault::set_step(step);
}

int ft_fault_hit(const char* name) {
    if (name == nullptr || !fault::armed.load(std::memory_order_relaxed)) return 0;
    auto verdict = fault::hit(name);
    return verdict.action == fault::Action::Corrupt ? 1 : verdict.action == fault::Action::Cut ? 2 : 0;
}

const char* ft_logs_place(void) {
    static const auto place = parent_of_runs();
    return place.c_str();
}

void ft_remove_old_logs(void) {
    (void)guarded([] {
        remove_old_runs(parent_of_runs() + "/none", "");
        return int{FT_OK};
    });
}

const char* ft_fault_missed(void) {
    thread_local std::string missed;
    Json j;
    j.begin_list();
    for (const auto& fault : fault::missed()) {
        j.begin().key("at").text(fault.at).key("passes").number(fault.passes);
        if (fault.has_step) j.key("step").number(fault.step);
        j.end();
    }
    missed = j.end_list().str();
    return missed.c_str();
}

int ft_fault_configure(const char* spec, int32_t rank, int32_t incarnation) {
    return guarded([&] {
        auto s = fault::configure(spec != nullptr ? spec : "", rank, incarnation);
        return s ? int{FT_OK} : fail(s);
    });
}

}  // extern "C"
