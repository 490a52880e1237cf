// Failed operations under the policy replay. That all saw one fail is history as well: whoever runs again must see the same, also
// where its own log has a result of it (logged, and given up before the fence was through), and when everybody who decided it is dead.
//
// A failure is on record before the call returns; every vote carries those that its rank knows, from its memory or its log; every decision
// carries all of them. What is in no living rank's memory and in no log, no call has returned.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "channel/log.h"
#include "collectives/records.h"

namespace ftcomm {

class FailureLog {
public:
    FailureLog(Log& log, const LogKey& key) : log_(log), key_(key) {}

    Status read();  // what the processes before this one have noted
    // The first operation that is revoked, if the log says so.
    std::optional<std::uint64_t> revoked_from() const { return revoked_from_; }

    const Cause* of(std::uint64_t seq) const;  // null: none is known
    std::uint64_t newest() const { return known_.empty() ? 0 : known_.rbegin()->first; }
    bool all_noted() const;
    std::vector<Failure> list() const;

    void learn(const Decision& d);
    void note(std::uint64_t seq, const Cause& cause);

private:
    struct Known {
        Cause cause;
        bool noted;  // in this rank's log
    };
    Log& log_;
    const LogKey key_;
    std::map<std::uint64_t, Known> known_;
    std::optional<std::uint64_t> revoked_from_;
};

}  // namespace ftcomm
