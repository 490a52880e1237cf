// The plan: a pure function of votes, the decision before, and who is alive. Whoever computes it gets the same.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "collectives/records.h"
#include "membership/rules.h"

namespace ftcomm {

struct PlanInput {
    const CommSpec& spec;
    const Decision& previous;
    const std::map<int, Vote>& votes;      // communicator rank -> vote; exactly the voters
    RankSet dead;                          // communicator ranks that are out of the job view
    std::map<int, Evidence> evidence;      // of the dead
    std::uint64_t epoch = 0;
    Rules rules{};
};

Decision make_decision(const PlanInput& in);

// What an operation nobody has planned for does among `alive` of `size` ranks: a plan as well, so that there is one engine.
// A cause instead of runs: it cannot be done (a dead root).
struct DefaultPlan {
    std::optional<Cause> cause;
    std::vector<SegmentRun> runs;
};
DefaultPlan default_plan(const Shape& shape, int size, const RankSet& alive, const RankSet& dead,
                         const std::map<int, Evidence>& evidence, std::uint64_t epoch);

Cause peer_failure(const RankSet& dead, const std::map<int, Evidence>& evidence, std::uint64_t epoch, const char* advice);
const char* advice_for(Policy policy);   // what the user can do about a death

// "reduce 12, gather 4 of 16 segments": for events.
std::string describe(const OpPlan& plan);

}  // namespace ftcomm
