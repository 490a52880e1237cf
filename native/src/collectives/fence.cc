#include "base/failpoint.h"
#include "collectives/run.h"

namespace ftcomm {

bool logs_result(const RunEnv& env, const OpState& op) { return env.log == nullptr || !env.rules.l11 || env.log->log_result(op); }

void Fence::begin() {
    if (!logs_result(env_, op_)) return;
    begun_ = true;
    FT_POINT("fence.before");
    if (env_.size() == 1) {
        done_ = true;
        return;
    }
    if (!is_central()) return advance_rounds();
    if (env_.position != 0) {
        send(0, kWord);
        FT_POINT("fence.round");
    }
    advance_central();
}

void Fence::send(int position, std::uint16_t step) {
    auto h = env_.header(FrameKind::Fence, op_);
    h.step = step;
    env_.sender.send(env_.slot_of(env_.rank_at(position)), h);
}

void Fence::finish() {
    done_ = true;
    FT_POINT("fence.after");
}

void Fence::advance_rounds() {
    // Round r sends to position + 2^r and waits for position - 2^r.
    while ((1 << round_) < env_.size()) {
        send(env_.position + (1 << round_), static_cast<std::uint16_t>(round_));
        FT_POINT("fence.round");
        if ((got_ & (std::uint64_t{1} << round_)) == 0) return;
        ++round_;
    }
    finish();
}

void Fence::advance_central() {
    if (env_.position == 0) {
        if (words_ + 1 < env_.size()) return;
        for (int i = 1; i < env_.size(); ++i) {
            send(i, kRelease);
            FT_POINT("fence.round");
        }
    } else if ((got_ & (std::uint64_t{1} << kRelease)) == 0) {
        return;
    }
    finish();
}

void Fence::on_frame(const FrameHeader& header) {
    if (header.step == kWord) ++words_;
    else got_ |= std::uint64_t{1} << (header.step & 63);
    if (!begun_ || done_) return;
    if (is_central()) return advance_central();
    if ((got_ & (std::uint64_t{1} << round_)) == 0) return;
    ++round_;
    advance_rounds();
}

}  // namespace ftcomm
