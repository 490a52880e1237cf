#include <cstdio>

#include "sim/scenario.h"

namespace ftcomm::sim {

const char* to_string(FaultKind kind) {
    switch (kind) {
        case FaultKind::Crash: return "crash";
        case FaultKind::CrashHost: return "crash-host";
        case FaultKind::CrashAll: return "crash-all";
        case FaultKind::Stop: return "stop";
        case FaultKind::CutLink: return "cut-link";
        case FaultKind::Isolate: return "partition";
        case FaultKind::Reset: return "reset";
        case FaultKind::Firewall: return "firewall";
        case FaultKind::AuthoritySlow: return "authority-slow";
        case FaultKind::AuthorityUnknown: return "authority-unknown";
        case FaultKind::AuthorityLost: return "authority-lost";
        case FaultKind::AuthorityBlank: return "authority-blank";
        case FaultKind::Pause: return "pause";
    }
    return "?";
}

std::string describe(const Scenario& s) {
    char line[256];
    std::snprintf(line, sizeof line,
                  "seed %llu: %d ranks, %d communicators, %zu steps, segment %llu B, flat limit %llu B, link %d frames, trees of "
                  "%d%s%s%s%s%s%s\n",
                  static_cast<unsigned long long>(s.seed), s.ranks, static_cast<int>(s.comms.size()), s.steps.size(),
                  static_cast<unsigned long long>(s.segment_bytes), static_cast<unsigned long long>(s.flat_limit),
                  s.network.frames, s.spread_degree, s.quiet ? ", quiet" : "",
                  s.notes               ? ", replay with checkpoints and notes"
                  : s.resume_group >= 0 ? ", replay with checkpoints"
                  : s.replay            ? ", replay"
                  : s.joins             ? ", joins"
                                        : "",
                  s.peer_memory ? ", peer memory" : "", s.unreadable >= 0 ? " but of one rank" : "",
                  s.crowded && s.stages && s.windowless >= 0 ? ", crowded with windows but of one rank"
                  : s.crowded && s.stages                    ? ", crowded with windows"
                  : s.crowded                                ? ", crowded"
                                                             : "",
                  s.posts ? ", shown inputs" : "");
    std::string out = line;
    out += "  hosts";
    for (auto h : s.hosts) out += " " + std::to_string(h);
    out += "\n";
    if (!s.log_groups.empty()) out += "  log groups";
    for (auto g : s.log_groups) out += " " + std::to_string(g);
    if (!s.log_groups.empty()) out += "\n";
    for (const auto& c : s.comms)
        out += "  " + c.name + " " + RankSet::of(c.members).text() +
               (c.policy == Policy::Raise   ? " raise"
                : c.policy == Policy::Lossy ? " lossy"
                                            : " replay") +
               " from group " + std::to_string(c.created_at) + "\n";
    static const char* const triggers[] = {"group",        "frozen",     "decided",      "suspected", "view-changed",
                                           "join-waiting", "admit-vote", "admit-decide", "joined",    "caught-up"};
    for (const auto& f : s.faults) {
        std::snprintf(line, sizeof line, "  fault %s slot %d other %d at %s %d%s after %d frames for %.3f s%s\n",
                      to_string(f.kind), f.slot, f.other, triggers[static_cast<int>(f.trigger)],
                      f.trigger == Trigger::Group ? f.group : f.nth,
                      f.at_subject   ? " (its subject)"
                      : f.at_emitter ? " (its emitter)"
                                     : "",
                      f.commits, static_cast<double>(f.duration) * 1e-9, f.both ? " both ways" : "");
        out += line;
    }
    return out;
}

}  // namespace ftcomm::sim
