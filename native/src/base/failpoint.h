// Named places where a test can kill, stop, delay, corrupt or cut. One relaxed load and a not-taken branch when off.
//   FTCOMM_FAULTS="rank=2,at=ring.rs.hop:3,do=kill; rank=1.1,at=fence.before:1,step=40,do=stop:3"
// `rank=R.I` means incarnation I (default 0); `:NTH` the nth time the point is passed (default 1); with `step=N` counting
// starts when the training step (set by FT's step hook, `ft_fault_step`) reaches N. `at=step:N` is the point itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace ftcomm::fault {

enum class Action : std::uint8_t { None, Corrupt, Cut };  // kill, stop, exit and delay happen inside hit()

struct Verdict {
    Action action = Action::None;
    int argument = 0;  // Cut: the peer's rank
};

struct PointInfo {
    const char* name;
    const char* where;  // one sentence for `ftcomm faults`
};

// A fault of this process whose turn has not come. Untold, it would look like one that was survived.
struct Missed {
    std::string at;             // as in the spec: "ring.rs.hop:3"
    std::uint64_t step = 0;     // passes counted from this training step on
    bool has_step = false;
    std::uint64_t passes = 0;   // so many times was the point passed; not counted for "step"
};

extern std::atomic<bool> armed;           // true only when a fault of this rank and incarnation is set
Status configure(const std::string& spec, int rank, int incarnation);
Verdict hit(const char* name);            // counts, and acts when its turn has come
void set_step(std::uint64_t step);        // also passes the point "step"
std::vector<Missed> missed();
const PointInfo* all_points(std::size_t* count);

}  // namespace ftcomm::fault

// Native points: FT_POINT("ring.rs.hop"). The name must be in the table in failpoint.cc (checked by a test).
#define FT_POINT(name) \
    (::ftcomm::fault::armed.load(std::memory_order_relaxed) ? ::ftcomm::fault::hit(name) : ::ftcomm::fault::Verdict{})
