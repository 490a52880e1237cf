// While a job starts: which founders of this host have ended. There is no robust futex yet to tell, and whoever waits for one of
// them would wait until the timeout of the start.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/rank_set.h"
#include "base/status.h"
#include "runtime/address.h"
#include "runtime/host.h"
#include "runtime/io_loop.h"

namespace ftcomm {

class StartWatch {
public:
    // All with the engine locked. on_gone runs on the loop, the engine locked, after gone() has changed.
    void begin(IoLoop& loop, const HostIdentity& own, const std::vector<Address>& founders, std::function<void()> on_gone);
    void end();
    const RankSet& gone() const { return gone_; }
    // PeerFailure that names them.
    Status failure() const;

    void close_in_child();  // descriptors only

private:
    struct Founder {
        int rank, pidfd;
    };
    IoLoop* loop_ = nullptr;
    std::vector<Founder> founders_;
    RankSet gone_;
};

}  // namespace ftcomm
