#include "base/shared_writer.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace ftcomm {

namespace {

constexpr double kDisturbed = 4;  // ns a byte: the thread was not running
constexpr double kSlow = 2.5;  // times what it takes past the caches
// Of the readers some may be on this core's side also where others are not.
constexpr int kSlowCounts = 4, kTooSlow = 12;
constexpr int kQuick = 8;

}  // namespace

bool SharedWriter::probes() {
    if (!measures_ || way_ != Into::Memory || ++since_ < kEvery) return false;
    since_ = 0;
    return true;
}

void SharedWriter::copy(void* to, const void* from, std::size_t bytes) {
    if (!measures_ || bytes < kLeast) return ftcomm::copy(to, from, bytes, way_);
    const auto into = probes() ? Into::Caches : way_;
    const auto begun = monotonic_ns();
    ftcomm::copy(to, from, bytes, into);
    took(into, bytes, monotonic_ns() - begun);
}

void SharedWriter::took(Into into, std::size_t bytes, std::int64_t ns) {
    const auto each = static_cast<double>(ns) / static_cast<double>(bytes);
    if (each > kDisturbed) return;
    if (into == Into::Memory) {
        past_ += past_ == 0 ? each : (each - past_) / 8;
        return;
    }
    if (past_ == 0) return;
    const bool slow = each > kSlow * past_;
    if (way_ == Into::Caches) {
        slow_ = slow ? slow_ + kSlowCounts : std::max(slow_ - 1, 0);
        if (slow_ < kTooSlow) return;
        way_ = Into::Memory;
        since_ = quick_ = 0;
    } else {
        quick_ = slow ? 0 : quick_ + 1;
        if (quick_ < kQuick) return;
        way_ = Into::Caches;
        slow_ = 0;
    }
}

}  // namespace ftcomm
