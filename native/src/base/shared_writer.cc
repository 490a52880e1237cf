#include "base/shared_writer.h"

#include <algorithm>

#include "base/clock.h"

namespace ftcomm {

namespace {

constexpr double kSlow = 0.2, kDisturbed = 4;  // ns a byte; the latter: the thread was not running

}  // namespace

void SharedWriter::copy(void* to, const void* from, std::size_t bytes) {
    if (!measures_ || bytes < kLeast) return copy_bytes(to, from, bytes);
    if (way() == Into::Memory) {
        copy_past_cache(to, from, bytes);
        return went_past();
    }
    const auto begun = monotonic_ns();
    copy_bytes(to, from, bytes);
    took(bytes, monotonic_ns() - begun);
}

void SharedWriter::took(std::size_t bytes, std::int64_t ns) {
    const auto each = static_cast<double>(ns) / static_cast<double>(bytes);
    if (each > kDisturbed) return;
    if (each < kSlow) {  // perhaps by chance, or of several readers this one is near
        next_hold_ = std::max(next_hold_ / 2, kFirstHold);
        return;
    }
    hold_ = next_hold_;
    next_hold_ = std::min(2 * next_hold_, kLongestHold);
}

}  // namespace ftcomm
