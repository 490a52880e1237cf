// Scenarios of the policy replay: whoever dies is replaced by a process that runs the same program from the top, on the same host.
#include <algorithm>

#include "base/check.h"
#include "base/reduce.h"
#include "sim/scenario_draw.h"

namespace ftcomm::sim {

namespace {

std::vector<int> draw_members(const Scenario& s, Random& r) {
    std::vector<int> members;
    for (int i = 0; i < s.ranks; ++i)
        if (r.chance(0.7)) members.push_back(i);
    if (members.empty()) members.push_back(r.index(static_cast<std::size_t>(s.ranks)));
    return members;
}

// Mostly sums of floats: another order of the same summands gives other bits.
Step draw_replay_collective(const Scenario& s, Random& r, int comm) {
    static const std::vector<OpKind> kinds{OpKind::AllReduce, OpKind::AllReduce, OpKind::AllReduce,     OpKind::AllReduce,
                                           OpKind::AllReduce, OpKind::Broadcast, OpKind::Reduce,        OpKind::Reduce,
                                           OpKind::AllGather, OpKind::AllGather, OpKind::ReduceScatter, OpKind::ReduceScatter,
                                           OpKind::Gather,    OpKind::Scatter,   OpKind::AllToAll,      OpKind::Barrier};
    static const std::vector<DType> types{DType::Float16, DType::BFloat16, DType::Float32, DType::Float32,
                                          DType::Float32, DType::Float64,  DType::Float64, DType::Int32};
    static const std::vector<ReduceOp> ops{ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Sum,      ReduceOp::Avg,
                                           ReduceOp::Avg, ReduceOp::Max, ReduceOp::PremulSum};
    static const std::vector<std::uint64_t> counts{0, 1, 2, 5, 17, 33, 64, 100, 200};
    Step step;
    step.comm = comm;
    step.op = r.pick(kinds);
    step.dtype = r.pick(types);
    step.reduce = r.pick(ops);
    if (!reduce_supported(step.dtype, step.reduce)) step.reduce = ReduceOp::Sum;
    step.root = r.index(static_cast<std::size_t>(s.ranks));
    step.count = step.op == OpKind::Barrier ? 0 : r.chance(0.03) ? 600 : r.pick(counts);
    if (step.op == OpKind::AllReduce && r.chance(0.4)) step.algorithm = r.chance(0.6) ? Algorithm::Ring : Algorithm::Flat;
    if (step.op == OpKind::AllReduce && r.chance(0.15)) step.algorithm = Algorithm::RingLogged;
    if (gathers(step.op) && r.chance(0.4)) step.algorithm = Algorithm::Ring;
    step.uneven = (step.op == OpKind::Gather || step.op == OpKind::Scatter || step.op == OpKind::AllToAll) && r.chance(0.5);
    return step;
}

void draw_replay_script(Scenario& s, Random& r) {
    std::vector<int> owed;  // steps that a later group goes on from
    const int groups = static_cast<int>(r.between(16, 26));
    for (int group = 0; group < groups || !owed.empty(); ++group) {
        s.groups.push_back(static_cast<int>(s.steps.size()));
        std::vector<int> usable;
        for (int c = 0; c < static_cast<int>(s.comms.size()); ++c)
            if (s.comms[static_cast<std::size_t>(c)].created_at <= group) usable.push_back(c);
        if (!owed.empty() && (group >= groups || r.chance(0.4))) {
            const int of = r.pick(owed);
            const Step& before = s.steps[static_cast<std::size_t>(of)];
            Step after = before;
            after.kind = before.kind == StepKind::FanIn ? StepKind::Answer : StepKind::WebReceive;
            after.of = of;
            owed.erase(std::find(owed.begin(), owed.end(), of));
            s.steps.push_back(after);
        }
        for (int n = r.chance(0.5) ? 1 : static_cast<int>(r.between(2, 4)); n > 0 && group < groups; --n) {
            const int comm = r.pick(usable);
            if (r.chance(0.65)) {
                s.steps.push_back(draw_replay_collective(s, r, comm));
                continue;
            }
            static const std::vector<StepKind> kinds{StepKind::Web, StepKind::WebSend, StepKind::FanIn};
            Step step;
            step.kind = r.pick(kinds);
            step.comm = comm;
            step.root = r.index(static_cast<std::size_t>(s.ranks));
            step.each = static_cast<int>(r.between(1, 3));
            // What is still owed goes on from here, in a later group.
            if (step.kind != StepKind::Web) owed.push_back(static_cast<int>(s.steps.size()));
            s.steps.push_back(step);
        }
    }
    s.groups.push_back(static_cast<int>(s.steps.size()));
}

Fault draw_replay_fault(const Scenario& s, Random& r, bool in_recovery) {
    using enum FaultKind;
    static const std::vector<FaultKind> kinds{Crash,  Crash, Crash,   Crash, Crash, Crash,    Crash,         CrashHost,
                                              Stop,   Stop,  CutLink, Reset, Pause, Firewall, AuthoritySlow, AuthorityUnknown,
                                              Isolate};
    Fault f;
    f.kind = r.pick(kinds);
    if (s.may_lose_all && r.chance(0.3)) f.kind = CrashAll;
    f.slot = r.index(static_cast<std::size_t>(s.ranks));
    do f.other = r.index(static_cast<std::size_t>(s.ranks));
    while (f.other == f.slot);
    f.group = r.index(static_cast<std::size_t>(s.group_count()));
    f.commits = static_cast<int>(r.chance(0.5) ? r.below(8) : r.below(60));
    f.duration = r.chance(0.4) ? r.between(1, kHeartbeat) : r.between(kHeartbeat, 5 * kHeartbeat);
    if (f.kind == Reset) f.duration = r.between(0, 5 * kMs);
    if (f.kind == Firewall) f.duration = r.between(3 * kHeartbeat, 6 * kHeartbeat);
    f.both = r.chance(0.3);
    if (in_recovery) {
        static const std::vector<Trigger> triggers{
            Trigger::Frozen,      Trigger::Decided, Trigger::Decided, Trigger::Suspected, Trigger::ViewChanged,
            Trigger::JoinWaiting, Trigger::Joined,  Trigger::Joined,  Trigger::CaughtUp,  Trigger::CaughtUp};
        f.trigger = r.pick(triggers);
        f.at_subject = r.chance(0.4);
        f.nth = static_cast<int>(r.chance(0.8) ? r.between(1, 6) : r.between(1, 40));
        f.at_emitter = r.chance(0.6);
        f.commits = static_cast<int>(r.below(16));
    }
    return f;
}

}  // namespace

Scenario draw_replay(std::uint64_t seed) {
    Random r(seed ^ 0x4e91a7ULL);
    Scenario s;
    s.seed = seed;
    s.replay = true;
    s.ranks = static_cast<int>(r.between(2, 6));
    int hosts = r.chance(0.4) ? 1 : r.chance(0.4) ? s.ranks : static_cast<int>(r.between(2, std::min(3, s.ranks)));
    if (is_for_windows(s)) {
        s.ranks = std::max(s.ranks, 3);
        hosts = 1;
    }
    for (int i = 0; i < s.ranks; ++i) s.hosts.push_back(1000 + static_cast<std::uint64_t>(i * hosts / s.ranks));
    s.joinable.assign(static_cast<std::size_t>(s.ranks), true);
    s.leave_at.assign(static_cast<std::size_t>(s.ranks), -1);
    s.may_lose_all = r.chance(0.2);
    draw_network(s, r);
    std::vector<int> all;
    for (int i = 0; i < s.ranks; ++i) all.push_back(i);
    s.comms.push_back({"world", all, Policy::Replay, 1000 * kHeartbeat, 0});
    for (int more = r.index(3); more > 0; --more)
        s.comms.push_back({more == 2 ? "group(a)" : "group(b)", draw_members(s, r), Policy::Replay, 1000 * kHeartbeat,
                           r.chance(0.3) ? r.index(6) : 0});
    draw_replay_script(s, r);
    draw_checkpoints(s);
    const int count = static_cast<int>(r.between(2, 6));
    for (int i = 0; i < count; ++i) s.faults.push_back(draw_replay_fault(s, r, i > 0 && r.chance(0.6)));
    s.faults[0].kind = FaultKind::Crash;  // something to recover from, early
    s.faults[0].group = r.index(static_cast<std::size_t>(s.group_count() * 2 / 3 + 1));
    aim_at_checkpoints(s);
    s.log_late = hosts > 1 && r.chance(0.7);
    draw_log_groups(s);
    draw_shared_sums(s);
    return s;
}

// Where all ranks are on one host, most steps of every other seed are sums whose parts are read in their owners' logs.
void draw_shared_sums(Scenario& s) {
    Random r(s.seed ^ 0x5a4eedULL);
    if (s.hosts.front() != s.hosts.back() || !r.chance(0.5) || is_for_windows(s)) return;
    for (auto& step : s.steps) {
        if (step.kind != StepKind::Collective || !r.chance(0.7)) continue;
        step.op = OpKind::AllReduce;
        step.algorithm = Algorithm::Ring;
        step.uneven = false;
        if (step.count == 0) step.count = 33;
        if (!reduce_supported(step.dtype, step.reduce)) step.reduce = ReduceOp::Sum;
    }
}

// In three of ten seeds. Drawn by themselves, so that the other draws of a seed stay as they were.
void draw_log_groups(Scenario& s) {
    Random r(s.seed ^ 0x96a0b6ULL);
    if (!r.chance(0.3)) return;
    const int most = r.index(static_cast<std::size_t>(s.ranks)) + 1;
    const bool by_host = r.chance(0.3);
    for (int i = 0; i < s.ranks; ++i)
        s.log_groups.push_back(by_host ? static_cast<std::int32_t>(s.hosts[static_cast<std::size_t>(i)])
                                       : r.index(static_cast<std::size_t>(most)));
}

Scenario undisturbed(Scenario s) {
    s.quiet = true;
    s.faults.clear();
    s.stages = s.posts = false;  // what goes by windows has the bits that it has without
    return s;
}

}  // namespace ftcomm::sim
