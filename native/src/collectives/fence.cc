#include "base/failpoint.h"
#include "collectives/run.h"

namespace ftcomm {

void Fence::begin() {
    if (env_.log != nullptr && env_.rules.l11 && !env_.log->log_result(op_)) return;
    begun_ = true;
    FT_POINT("fence.before");
    if (env_.size() == 1) {
        done_ = true;
        return;
    }
    advance();
}

void Fence::advance() {
    // Round r sends to position + 2^r and waits for position - 2^r.
    while (true) {
        const bool sent_all = (1 << round_) >= env_.size();
        if (sent_all) {
            done_ = true;
            FT_POINT("fence.after");
            return;
        }
        auto h = env_.header(FrameKind::Fence, op_);
        h.step = static_cast<std::uint16_t>(round_);
        env_.sender.send(env_.slot_of(env_.rank_at(env_.position + (1 << round_))), h);
        FT_POINT("fence.round");
        if ((got_ & (std::uint64_t{1} << round_)) == 0) return;
        ++round_;
    }
}

void Fence::on_frame(const FrameHeader& header) {
    got_ |= std::uint64_t{1} << (header.step & 63);
    if (!begun_ || done_) return;
    if ((got_ & (std::uint64_t{1} << round_)) == 0) return;
    ++round_;
    advance();
}

}  // namespace ftcomm
