#include "base/shared_writer.h"

#include <algorithm>

#include "base/clock.h"

namespace ftcomm {

namespace {

constexpr double kSlow = 0.2, kDisturbed = 4;  // ns a byte; the latter: the thread was not running
constexpr std::size_t kOnceRound = 4u << 20;  // bytes: more than a link has, or a window

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
    if (!measures_ || each > kDisturbed) return;
    if (each < kSlow) {
        // Perhaps of several readers this one is near; or, where little was written for a while, the far one has let go of what it has read:
        // once round.
        quick_ += bytes;
        if (quick_ < kOnceRound) return;
        next_hold_ = std::max(next_hold_ / 2, kFirstHold);
        quick_ = 0;
        return;
    }
    quick_ = 0;
    hold_ = next_hold_;
    next_hold_ = std::min(2 * next_hold_, kLongestHold);
}

}  // namespace ftcomm
