#include "collectives/logged_share.h"

#include <algorithm>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"

namespace ftcomm {

void LoggedShare::begin(const std::vector<SegmentRun>& plan) {
    if (env_.log == nullptr || op_.shape.kind != OpKind::AllReduce || env_.living.size() != env_.slots.size()) return;
    if (!std::ranges::all_of(plan, [](const SegmentRun& r) { return r.mode == SegmentMode::Reduce; })) return;
    std::uint32_t s = 0;
    first_.assign(env_.slots.size(), 0);
    for (const auto& r : plan) {
        first_[static_cast<std::size_t>(r.rank)] = s;
        s += r.count;
    }
    next_ = first_[static_cast<std::size_t>(env_.rank)];
    on_ = env_.log->begin_share(op_);
}

std::size_t LoggedShare::bytes(std::uint32_t s, std::uint32_t segments) const {
    return op_.grid.count(s, segments) * size_of(op_.desc.dtype);
}

bool LoggedShare::put(std::uint32_t s, std::uint32_t segments, const std::byte* from) {
    if (!on_) return false;
    FT_CHECK(s == next_, "segment %u is shared, not %u", s, next_);
    next_ += segments;
    on_ = env_.log->put_in_share(ByteView(from, bytes(s, segments)));
    if (on_) FT_POINT("share.put");
    return on_;
}

bool LoggedShare::find(int owner, std::uint32_t s, std::uint32_t segments) {
    if (first_.empty()) return false;
    const auto at = (op_.grid.offset(s) - op_.grid.offset(first_[static_cast<std::size_t>(owner)])) * size_of(op_.desc.dtype);
    return env_.log->view_share(op_, owner, at, bytes(s, segments), &found_).ok();
}

bool LoggedShare::take(std::uint32_t s) {
    copy_bytes(op_.result(s), found_.bytes.data(), found_.bytes.size());
    FT_POINT("share.read");
    return found_.stands();
}

}  // namespace ftcomm
