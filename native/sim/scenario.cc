#include "sim/scenario.h"

#include <cstdio>

#include "base/reduce.h"

namespace ftcomm::sim {

const char* to_string(FaultKind kind) {
    switch (kind) {
        case FaultKind::Crash: return "crash";
        case FaultKind::CrashHost: return "crash-host";
        case FaultKind::Stop: return "stop";
        case FaultKind::CutLink: return "cut-link";
        case FaultKind::Isolate: return "partition";
        case FaultKind::Reset: return "reset";
        case FaultKind::AuthoritySlow: return "authority-slow";
        case FaultKind::AuthorityUnknown: return "authority-unknown";
        case FaultKind::AuthorityLost: return "authority-lost";
        case FaultKind::AuthorityBlank: return "authority-blank";
        case FaultKind::Pause: return "pause";
    }
    return "?";
}

namespace {

void draw_ranks(Scenario& s, Random& r) {
    s.ranks = r.chance(0.75) ? static_cast<int>(r.between(3, 6)) : static_cast<int>(r.between(7, r.chance(0.3) ? 16 : 9));
    const int hosts = r.chance(0.35) ? 1 : r.chance(0.4) ? s.ranks : static_cast<int>(r.between(2, 3));
    for (int i = 0; i < s.ranks; ++i) s.hosts.push_back(1000 + static_cast<std::uint64_t>(i * hosts / s.ranks));
    s.joins = !s.quiet && r.chance(0.4);
    s.joinable.assign(static_cast<std::size_t>(s.ranks), false);
    if (s.joins)
        for (int i = 0; i < s.ranks; ++i) s.joinable[static_cast<std::size_t>(i)] = r.chance(0.6);
    s.leave_at.assign(static_cast<std::size_t>(s.ranks), -1);
}

void draw_network(Scenario& s, Random& r) {
    static const std::vector<std::uint64_t> segments{16, 24, 32, 64, 128};
    s.segment_bytes = r.pick(segments);
    static const std::vector<std::uint64_t> flats{0, 1, 1, 16, 64, 4096};
    s.flat_limit = r.pick(flats);
    static const std::vector<std::uint64_t> eagers{0, 16, 64, 4096};
    s.eager_limit = r.pick(eagers);
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
        plan.timeout = timeout;
        bool replaceable = false;
        for (int m : plan.members) replaceable = replaceable || s.joinable[static_cast<std::size_t>(m)];
        // A replacement takes its place in lossy communicators only: under raise the user shrinks.
        plan.policy = replaceable || r.chance(0.5) ? Policy::Lossy : Policy::Raise;
        plan.created_at = r.chance(0.3) && !s.joins ? r.index(8) : 0;
        s.comms.push_back(std::move(plan));
    }
}

Step draw_collective(const Scenario& s, Random& r, int comm) {
    static const std::vector<OpKind> kinds{OpKind::AllReduce, OpKind::AllReduce, OpKind::AllReduce,     OpKind::AllReduce,
                                           OpKind::AllReduce, OpKind::AllReduce, OpKind::Broadcast,     OpKind::Broadcast,
                                           OpKind::Reduce,    OpKind::AllGather, OpKind::ReduceScatter, OpKind::Gather,
                                           OpKind::Scatter,   OpKind::AllToAll,  OpKind::Barrier};
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
    step.count = r.chance(0.02) ? 600 : r.pick(counts);
    if (step.op == OpKind::Barrier) step.count = 0;
    if (step.op == OpKind::AllReduce && r.chance(0.3)) step.algorithm = r.chance(0.7) ? Algorithm::Ring : Algorithm::Flat;
    step.uneven = (step.op == OpKind::Gather || step.op == OpKind::Scatter || step.op == OpKind::AllToAll) && r.chance(0.5);
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
            s.steps.push_back({.kind = StepKind::Admit});
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
                                              FaultKind::Stop,
                                              FaultKind::Stop,
                                              FaultKind::Stop,
                                              FaultKind::CutLink,
                                              FaultKind::CutLink,
                                              FaultKind::Isolate,
                                              FaultKind::Reset,
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
    f.group = r.index(static_cast<std::size_t>(s.group_count()));
    f.commits = static_cast<int>(r.chance(0.5) ? r.below(8) : r.below(80));
    f.duration = r.chance(0.4) ? r.between(1, kHeartbeat) : r.between(kHeartbeat, 5 * kHeartbeat);
    f.both = r.chance(0.3);
    if (in_recovery) {
        static const std::vector<Trigger> triggers{Trigger::Frozen,  Trigger::Frozen,    Trigger::Decided,
                                                   Trigger::Decided, Trigger::Suspected, Trigger::ViewChanged};
        f.trigger = s.joins && r.chance(0.2) ? Trigger::JoinWaiting : r.pick(triggers);
        f.nth = static_cast<int>(r.chance(0.8) ? r.between(1, 4) : r.between(1, 30));
        f.at_emitter = r.chance(0.6);
        f.commits = static_cast<int>(r.below(12));
    }
    return f;
}

}  // namespace

Scenario draw_scenario(std::uint64_t seed) {
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
        if (s.ranks <= 4 && s.network.spike == 0) {
            // A connection is reset and the peer goes on being heard: no ground to vote it out (M6).
            for (int i = 0; i < 4; ++i) {
                Fault f = draw_fault(s, r, false);
                f.kind = FaultKind::Reset;
                s.faults.push_back(f);
            }
        } else if (r.chance(0.5)) {
            Fault f;
            f.kind = FaultKind::Pause;
            f.group = r.index(static_cast<std::size_t>(s.group_count()));
            f.duration = r.between(kHeartbeat / 10, 20 * kHeartbeat);
            s.faults.push_back(f);
        }
        return s;
    }
    if (r.chance(0.15)) {
        const int slot = r.index(static_cast<std::size_t>(s.ranks));
        s.leave_at[static_cast<std::size_t>(slot)] = r.index(static_cast<std::size_t>(s.group_count()));
    }
    const int count = static_cast<int>(r.between(2, s.ranks > 4 ? 5 : 3));
    const bool in_recovery = seed % 2 == 0 || seed % 8 == 1 || seed % 8 == 3;
    for (int i = 0; i < count; ++i) s.faults.push_back(draw_fault(s, r, in_recovery && i == count - 1));
    if (in_recovery) {  // something to recover from, early
        s.faults[0].kind = FaultKind::Crash;
        s.faults[0].group = r.index(static_cast<std::size_t>(s.group_count() / 2 + 1));
    }
    return s;
}

std::string describe(const Scenario& s) {
    char line[256];
    std::snprintf(line, sizeof line,
                  "seed %llu: %d ranks, %d communicators, %zu steps, segment %llu B, flat limit %llu B, link %d frames%s%s\n",
                  static_cast<unsigned long long>(s.seed), s.ranks, static_cast<int>(s.comms.size()), s.steps.size(),
                  static_cast<unsigned long long>(s.segment_bytes), static_cast<unsigned long long>(s.flat_limit),
                  s.network.frames, s.quiet ? ", quiet" : "", s.joins ? ", joins" : "");
    std::string out = line;
    out += "  hosts";
    for (auto h : s.hosts) out += " " + std::to_string(h);
    out += "\n";
    for (const auto& c : s.comms)
        out += "  " + c.name + " " + RankSet::of(c.members).text() + (c.policy == Policy::Raise ? " raise" : " lossy") +
               " from group " + std::to_string(c.created_at) + "\n";
    static const char* const triggers[] = {"group", "frozen", "decided", "suspected", "view-changed", "join-waiting"};
    for (const auto& f : s.faults) {
        std::snprintf(line, sizeof line, "  fault %s slot %d other %d at %s %d%s after %d frames for %.3f s%s\n",
                      to_string(f.kind), f.slot, f.other, triggers[static_cast<int>(f.trigger)],
                      f.trigger == Trigger::Group ? f.group : f.nth, f.at_emitter ? " (its emitter)" : "", f.commits,
                      static_cast<double>(f.duration) * 1e-9, f.both ? " both ways" : "");
        out += line;
    }
    return out;
}

}  // namespace ftcomm::sim
