#include "sim/scenario.h"

#include <algorithm>

#include "base/check.h"
#include "base/reduce.h"
#include "sim/scenario_draw.h"

namespace ftcomm::sim {

bool is_uniform(OpKind k) { return k == OpKind::AllReduce || gathers(k); }

bool is_reduction(OpKind k) { return reduces(k); }

namespace {

void draw_ranks(Scenario& s, Random& r) {
    s.ranks = r.chance(0.75) ? static_cast<int>(r.between(3, 6)) : static_cast<int>(r.between(7, r.chance(0.3) ? 16 : 9));
    int hosts = r.chance(0.35) ? 1 : r.chance(0.4) ? s.ranks : static_cast<int>(r.between(2, 3));
    s.resets = s.quiet && r.chance(0.4);
    if (s.resets) hosts = s.ranks = static_cast<int>(r.between(3, 4));
    if (is_for_windows(s)) hosts = 1;
    for (int i = 0; i < s.ranks; ++i) s.hosts.push_back(1000 + static_cast<std::uint64_t>(i * hosts / s.ranks));
    s.joins = !s.quiet && r.chance(0.4);
    s.joinable.assign(static_cast<std::size_t>(s.ranks), false);
    if (s.joins)
        for (int i = 0; i < s.ranks; ++i) s.joinable[static_cast<std::size_t>(i)] = r.chance(0.6);
    s.leave_at.assign(static_cast<std::size_t>(s.ranks), -1);
}

}  // namespace

bool is_for_windows(const Scenario& s) { return !s.resets && Random(s.seed ^ 0x1d0e5ULL).chance(0.1); }

void draw_network(Scenario& s, Random& r) {
    static const std::vector<std::uint64_t> segments{16, 24, 32, 64, 128};
    s.segment_bytes = r.pick(segments);
    static const std::vector<std::uint64_t> flats{0, 1, 1, 16, 64, 4096};
    s.flat_limit = r.pick(flats);
    static const std::vector<std::uint64_t> eagers{0, 16, 64, 4096};
    s.eager_limit = r.pick(eagers);
    static const std::vector<int> degrees{1, 1, 1, 2, 2, kSpreadDegree};
    Random trees(s.seed ^ 0x7ee5ULL);
    s.spread_degree = trees.pick(degrees);
    s.flat_trees = Random(s.seed ^ 0xf1a7ULL).chance(0.5);
    s.vote_trees = Random(s.seed ^ 0x707eULL).chance(0.5);
    s.crowded = Random(s.seed ^ 0xc20dULL).chance(0.5);
    s.stages = Random(s.seed ^ 0x57a9ULL).chance(0.7);
    s.posts = Random(s.seed ^ 0x9057ULL).chance(0.7);
    if (trees.chance(0.5)) {  // ranks that hear of everything late, but from one: others are ahead of them
        s.network.slow_from = trees.index(static_cast<std::size_t>(s.ranks));
        s.network.slow_to = trees.index(static_cast<std::size_t>(s.ranks));
        s.network.slow_by = trees.chance(0.5) ? 2 * kMs : kHeartbeat / 50;
    }
    s.peer_memory = Random(s.seed ^ 0x9ee7ULL).chance(0.7);  // by itself: the other draws of a seed stay as they were
    Random refusals(s.seed ^ 0x4ef5ULL);
    if (s.peer_memory && !s.replay && refusals.chance(0.15)) s.unreadable = static_cast<int>(refusals.between(0, s.ranks - 1));
    if (is_for_windows(s)) {
        Random rooms(s.seed ^ 0x4003ULL);
        if (rooms.chance(0.3)) s.windowless = static_cast<int>(rooms.between(0, s.ranks - 1));
        s.room = static_cast<int>(rooms.between(0, 2));
        if (rooms.chance(0.4)) s.pull_limit = 1u << 30;
        s.crowded = s.stages = true;
        s.flat_limit = 1;
    }
    auto& n = s.network;
    n.latency_high = r.chance(0.7) ? 300 * kUs : 20 * kMs;
    if (r.chance(0.5)) {
        n.spike = r.chance(0.5) ? 0.002 : 0.01;
        n.spike_high = r.chance(0.5) ? kHeartbeat / 20 : kHeartbeat / 5;
    }
    if (s.quiet && r.chance(0.6)) {
        n.spike = 0.003;
        n.spike_high = kHeartbeat * 8 / 10;
    }
    if (s.resets) {
        n.latency_high = 300 * kUs;
        n.spike = 0;
    }
    n.refuse = r.chance(0.4) ? 0.05 : 0;
    static const std::vector<int> frames{2, 4, 16, 256};
    n.frames = r.pick(frames);
    n.max_payload = r.chance(0.5) ? 4096 : 65536;
    if (r.chance(0.5)) {
        n.cell_low = 100 * kUs;
        n.cell_high = r.chance(0.3) ? 100 * kMs : 3 * kMs;
    }
    static const std::vector<Time> thinks{0, 50 * kUs, 2 * kMs};
    n.think = r.pick(thinks);
}

namespace {

void draw_comms(Scenario& s, Random& r) {
    const auto all = [&] {
        std::vector<int> v;
        for (int i = 0; i < s.ranks; ++i) v.push_back(i);
        return v;
    };
    const Time timeout = s.has_naps ? 4 * kHeartbeat : 1000 * kHeartbeat;
    s.comms.push_back({"world", all(), s.joins || r.chance(0.5) ? Policy::Lossy : Policy::Raise, timeout, 0});
    const int more = r.index(3);
    for (int c = 0; c < more; ++c) {
        CommPlan plan;
        plan.name = c == 0 ? "group(a)" : "group(b)";
        for (int i = 0; i < s.ranks; ++i)
            if (r.chance(0.7)) plan.members.push_back(i);
        if (plan.members.empty()) plan.members = all();
        Random order(s.seed ^ (0x0c0deULL + static_cast<std::uint64_t>(c)));  // of ranks: who leads here need not lead the job
        if (order.chance(0.5))
            for (auto i = plan.members.size(); i > 1; --i) std::swap(plan.members[i - 1], plan.members[order.below(i)]);
        plan.timeout = timeout;
        bool replaceable = false;
        for (int m : plan.members) replaceable = replaceable || s.joinable[static_cast<std::size_t>(m)];
        // A replacement takes its place in lossy communicators only: under raise the user shrinks.
        plan.policy = replaceable || r.chance(0.5) ? Policy::Lossy : Policy::Raise;
        plan.created_at = r.chance(0.3) ? r.index(8) : 0;
        s.comms.push_back(std::move(plan));
    }
}

Step draw_collective(const Scenario& s, Random& r, int comm) {
    static const std::vector<OpKind> kinds{OpKind::AllReduce, OpKind::AllReduce, OpKind::AllReduce, OpKind::AllReduce,
                                           OpKind::AllReduce, OpKind::AllReduce, OpKind::Broadcast, OpKind::Broadcast,
                                           OpKind::Reduce,    OpKind::AllGather, OpKind::AllGather, OpKind::ReduceScatter,
                                           OpKind::Gather,    OpKind::Scatter,   OpKind::AllToAll,  OpKind::Barrier};
    static const std::vector<DType> types{DType::UInt8,   DType::Int8,    DType::Int16,   DType::UInt16,
                                          DType::Int32,   DType::Int64,   DType::Float16, DType::BFloat16,
                                          DType::Float32, DType::Float64, DType::Bool,    DType::Complex64};
    static const std::vector<ReduceOp> ops{ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Avg,  ReduceOp::Avg,      ReduceOp::Product,
                                           ReduceOp::Min, ReduceOp::Max, ReduceOp::BXor, ReduceOp::PremulSum};
    static const std::vector<std::uint64_t> counts{0, 1, 2, 5, 17, 33, 64, 100};
    Step step;
    step.comm = comm;
    step.op = r.pick(kinds);
    step.dtype = r.pick(types);
    step.reduce = r.pick(ops);
    if (!reduce_supported(step.dtype, step.reduce)) step.reduce = ReduceOp::Sum;
    step.root = r.index(static_cast<std::size_t>(s.ranks));
    step.count = r.pick(counts);
    if (r.chance(0.02) && s.ranks <= 6) step.count = 600;
    if (step.op == OpKind::Barrier) step.count = 0;
    if (step.op == OpKind::AllReduce && r.chance(0.3)) step.algorithm = r.chance(0.7) ? Algorithm::Ring : Algorithm::Flat;
    if (gathers(step.op) && r.chance(0.4)) step.algorithm = Algorithm::Ring;
    step.uneven = (step.op == OpKind::Gather || step.op == OpKind::Scatter || step.op == OpKind::AllToAll) && r.chance(0.5);
    if (step.op == OpKind::AllToAll && !step.uneven && step.count % 2 == 0) step.counts_slot = step.root;
    return step;
}

void draw_script(Scenario& s, Random& r) {
    const int wanted = static_cast<int>(r.between(50, 64));
    int collectives = 0, group = 0;
    while (collectives < wanted) {
        s.groups.push_back(static_cast<int>(s.steps.size()));
        std::vector<int> usable;
        for (int c = 0; c < static_cast<int>(s.comms.size()); ++c)
            if (s.comms[static_cast<std::size_t>(c)].created_at <= group) usable.push_back(c);
        ++group;
        if (s.joins && r.chance(0.2)) {
            // Also from a second thread: what was posted before runs first, what comes after waits for the newcomers (M13).
            const auto around = [&](int most) {
                for (auto n = r.chance(0.5) ? r.between(1, most) : 0; n > 0; --n, ++collectives)
                    s.steps.push_back(draw_collective(s, r, r.pick(usable)));
            };
            around(2);
            Step admit{.kind = StepKind::Admit, .comm = r.pick(usable)};
            if (r.chance(0.05)) admit.revoking_slot = r.pick(s.comms[static_cast<std::size_t>(admit.comm)].members);
            s.steps.push_back(admit);
            around(3);
            if (Random next(s.seed ^ (0xa9eeULL + static_cast<std::uint64_t>(group))); next.chance(0.5)) {
                s.groups.push_back(static_cast<int>(s.steps.size()));  // with the newcomers, when some have just heard of them
                ++group;
                s.steps.push_back({.kind = StepKind::Agree, .comm = next.pick(usable)});
            }
            continue;
        }
        if (r.chance(0.12)) {
            Step p2p;
            p2p.kind = r.chance(0.5) ? StepKind::Ring : StepKind::Any;
            p2p.comm = r.pick(usable);
            p2p.root = r.index(static_cast<std::size_t>(s.ranks));
            p2p.count = r.pick(std::vector<std::uint64_t>{0, 1, 30, 64, 65, 300});
            s.steps.push_back(p2p);
            continue;
        }
        if (r.chance(0.06)) {
            s.steps.push_back({.kind = StepKind::Agree, .comm = r.pick(usable)});
            continue;
        }
        const int burst = r.chance(0.5) ? 1 : static_cast<int>(r.between(2, 4));
        for (int i = 0; i < burst; ++i) {
            Step step = draw_collective(s, r, r.pick(usable));
            const auto slot = [&] { return r.pick(s.comms[static_cast<std::size_t>(step.comm)].members); };
            if (!s.quiet) {
                if (r.chance(0.01)) step.odd_slot = slot();
                if (r.chance(0.01)) step.failing_slot = slot();
                if (r.chance(0.008)) step.revoking_slot = slot();
                const bool uniform = step.op == OpKind::AllReduce || step.op == OpKind::AllGather || step.op == OpKind::Barrier;
                if (r.chance(0.008) && uniform) step.quitting_slot = slot();
                if (s.has_naps && r.chance(0.02)) {
                    step.sleeping_slot = slot();
                    step.nap = 6 * kHeartbeat;
                }
            }
            s.steps.push_back(step);
            ++collectives;
        }
    }
    if (s.joins) {
        s.groups.push_back(static_cast<int>(s.steps.size()));
        s.steps.push_back({.kind = StepKind::Admit});
    }
    s.groups.push_back(static_cast<int>(s.steps.size()));
}

Fault draw_fault(const Scenario& s, Random& r, bool in_recovery) {
    static const std::vector<FaultKind> kinds{FaultKind::Crash,
                                              FaultKind::Crash,
                                              FaultKind::Crash,
                                              FaultKind::Crash,
                                              FaultKind::Crash,
                                              FaultKind::Crash,
                                              FaultKind::CrashHost,
                                              FaultKind::CrashHost,
                                              FaultKind::Stop,
                                              FaultKind::Stop,
                                              FaultKind::Stop,
                                              FaultKind::CutLink,
                                              FaultKind::CutLink,
                                              FaultKind::Isolate,
                                              FaultKind::Reset,
                                              FaultKind::Firewall,
                                              FaultKind::Firewall,
                                              FaultKind::AuthoritySlow,
                                              FaultKind::AuthorityUnknown,
                                              FaultKind::AuthorityUnknown,
                                              FaultKind::Pause};
    Fault f;
    f.kind = r.pick(kinds);
    if (r.chance(0.015)) f.kind = FaultKind::AuthorityLost;
    if (r.chance(0.025)) f.kind = FaultKind::AuthorityBlank;
    f.slot = r.index(static_cast<std::size_t>(s.ranks));
    do f.other = r.index(static_cast<std::size_t>(s.ranks));
    while (f.other == f.slot);
    f.group = r.index(static_cast<std::size_t>(s.group_count() - 1));
    f.commits = static_cast<int>(r.chance(0.5) ? r.below(8) : r.below(80));
    f.duration = r.chance(0.4) ? r.between(1, kHeartbeat) : r.between(kHeartbeat, 5 * kHeartbeat);
    if (f.kind == FaultKind::Reset) f.duration = r.between(0, 5 * kMs);
    if (f.kind == FaultKind::Firewall) f.duration = r.between(3 * kHeartbeat, 6 * kHeartbeat);
    f.both = r.chance(0.3);
    if (in_recovery) {
        static const std::vector<Trigger> triggers{Trigger::Frozen,  Trigger::Frozen,    Trigger::Decided,
                                                   Trigger::Decided, Trigger::Suspected, Trigger::ViewChanged};
        static const std::vector<Trigger> joining{Trigger::JoinWaiting, Trigger::AdmitVote, Trigger::AdmitDecide,
                                                  Trigger::Joined};
        f.trigger = s.joins && r.chance(0.5) ? r.pick(joining) : r.pick(triggers);
        f.at_subject = r.chance(0.4);
        f.nth = static_cast<int>(r.chance(0.8) ? r.between(1, 4) : r.between(1, 30));
        f.at_emitter = r.chance(0.6);
        f.commits = static_cast<int>(r.below(12));
    }
    return f;
}

// What every seed is to have. (World counts the faults that really happened.)
Scenario checked(Scenario s) {
    const auto collectives =
        std::count_if(s.steps.begin(), s.steps.end(), [](const Step& x) { return x.kind == StepKind::Collective; });
    FT_CHECK(s.ranks >= 3 && s.ranks <= 16 && collectives >= 50 && s.faults.size() >= 2,
             "seed %llu: %d ranks, %d collectives, %zu faults", static_cast<unsigned long long>(s.seed), s.ranks,
             static_cast<int>(collectives), s.faults.size());
    return s;
}

}  // namespace

Scenario draw_scenario(std::uint64_t seed) {
    if (is_replay(seed)) return draw_replay(seed);
    Random r(seed);
    Scenario s;
    s.seed = seed;
    s.quiet = seed % 8 == 7;
    draw_ranks(s, r);
    s.has_naps = !s.quiet && r.chance(0.1);
    draw_network(s, r);
    draw_comms(s, r);
    draw_script(s, r);
    if (s.quiet) {
        // Not failures, and not to be taken for any: connections are reset and heal while the peer goes on being heard (M6), or
        // the whole machine is paused (M11).
        for (int i = 0; i < (s.resets ? 4 : 2); ++i) {
            Fault f = draw_fault(s, r, false);
            f.kind = s.resets ? FaultKind::Reset : FaultKind::Pause;
            f.duration = s.resets ? r.between(0, 5 * kMs) : r.between(kHeartbeat / 10, 20 * kHeartbeat);
            s.faults.push_back(f);
        }
        return checked(std::move(s));
    }
    for (int leavers = r.chance(0.2) ? static_cast<int>(r.between(1, 2)) : 0; leavers > 0; --leavers) {
        const int slot = r.index(static_cast<std::size_t>(s.ranks));
        s.leave_at[static_cast<std::size_t>(slot)] = r.index(static_cast<std::size_t>(s.group_count()));
    }
    const int count = static_cast<int>(r.between(2, s.ranks > 4 ? 5 : 3));
    const bool in_recovery = seed % 2 == 0 || seed % 8 == 1 || seed % 8 == 3;
    const int in_it = r.chance(0.3) && count > 2 ? 2 : 1;  // the second may hit those who repair what the first has broken
    for (int i = 0; i < count; ++i) s.faults.push_back(draw_fault(s, r, in_recovery && i >= count - in_it));
    if (in_recovery) {  // something to recover from, early
        s.faults[0].kind = FaultKind::Crash;
        s.faults[0].trigger = Trigger::Group;
        s.faults[0].group = r.index(static_cast<std::size_t>(s.group_count() / 2 + 1));
    }
    // Those that end the job wait for another one.
    if (std::all_of(s.faults.begin(), s.faults.end(), ends_the_job)) s.faults[0].kind = FaultKind::Stop;
    return checked(std::move(s));
}

}  // namespace ftcomm::sim
