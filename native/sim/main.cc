// ftcomm-sim: many seeded runs of the real protocol objects over simulated links, and the invariants after every event.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "sim/expected.h"
#include "sim/mutations.h"
#include "sim/runner.h"
#include "sim/scale.h"
#include "sim/scenario.h"

namespace {

using namespace ftcomm::sim;

int usage() {
    std::fprintf(
        stderr,
        "usage: ftcomm-sim [--seeds N] [--first S] [--jobs J] [--mutate RULE]... [--stop-at-first] [--only-replay] [--expect "
        "NAME]...\n"
        "       ftcomm-sim --seed S [--mutate RULE] [--trace]     one seed, exactly as in a long run\n"
        "       ftcomm-sim --mutations [--seeds N]                each rule taken away: after how many seeds it is caught\n"
        "       ftcomm-sim --scale N [--link-us L] [--message-ns M] [--per-host H] [--fence-only]\n"
        "                                                         how many messages operations of N ranks take (JSON)\n");
    return 2;
}

void print_finding(const Finding& f) {
    std::printf("VIOLATION %s: %s\n", f.invariant.c_str(), f.text.c_str());
    std::fflush(stdout);
}

int many(const RunPlan& plan, const std::vector<std::string>& expected) {
    const RunResult r = run_seeds(plan, print_finding);
    std::printf("%" PRIu64 " seeds in %.1f s: %.0f seeds/s, %zu violations\n", r.seeds, r.seconds,
                static_cast<double>(r.seeds) / std::max(r.seconds, 1e-9), r.findings.size());
    std::map<std::string, std::string> by_invariant;
    for (const auto& f : r.findings)
        if (by_invariant[f.invariant].size() < 120) by_invariant[f.invariant] += " " + std::to_string(f.seed);
    for (const auto& [invariant, seeds] : by_invariant) std::printf("  %s: seeds%s\n", invariant.c_str(), seeds.c_str());
    for (const auto& [name, count] : r.counters) std::printf("  %12" PRIu64 "  %s\n", count, name.c_str());
    const auto count = [&](const std::string& name) {
        const auto it = r.counters.find(name);
        return it == r.counters.end() ? 0 : it->second;
    };
    bool complete = true;
    for (const auto& name : expected)
        if (count(name) == 0) {
            std::printf("  %12d  %s   <- never happened\n", 0, name.c_str());
            complete = false;
        }
    if (plan.count >= kLong && count(kInRecovery) * 2 < r.seeds) {
        std::printf("  only %" PRIu64 " of %" PRIu64 " seeds had a fault during a recovery\n", count(kInRecovery), r.seeds);
        complete = false;
    }
    // A short run need not have seen everything.
    return r.findings.empty() && (complete || plan.count < kLong) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    RunPlan plan;
    plan.count = 1000;
    bool one = false, trace = false, mutations = false;
    ScalePlan scale;
    std::vector<std::string> expected(std::begin(kExpected), std::end(kExpected));
    for (int i = 1; i < argc; ++i) {
        const std::string a = argv[i];
        const auto value = [&]() -> const char* {
            if (i + 1 >= argc) std::exit(usage());
            return argv[++i];
        };
        const auto number = [&]() -> std::uint64_t {
            const char* text = value();
            char* end = nullptr;
            const auto n = std::strtoull(text, &end, 10);
            if (end == text || *end != '\0') std::exit(usage());
            return n;
        };
        const auto small_number = [&] {
            const auto n = number();
            if (n < 1 || n > 1'000'000) std::exit(usage());
            return static_cast<int>(n);
        };
        if (a == "--seeds") plan.count = number();
        else if (a == "--first") plan.first = number();
        else if (a == "--seed") plan.first = number(), one = true;
        else if (a == "--jobs") plan.jobs = std::max(1, static_cast<int>(number()));
        else if (a == "--mutate") plan.mutations.push_back(value());
        else if (a == "--mutations") mutations = true;
        else if (a == "--trace") trace = true;
        else if (a == "--only-replay") plan.only_replay = true;
        else if (a == "--stop-at-first") plan.stop_at_first = true;
        else if (a == "--expect") expected.push_back(value());
        else if (a == "--scale") scale.ranks = small_number();
        else if (a == "--link-us") scale.cost.latency = small_number() * ftcomm::Time{1000};
        else if (a == "--message-ns") scale.cost.overhead = small_number();
        else if (a == "--per-host") scale.per_host = small_number();
        else if (a == "--fence-only") scale.fence_only = true;
        else return usage();
    }
    if (scale.ranks > 0) return scale.ranks > 1 ? run_scale(scale) : usage();
    for (const auto& m : plan.mutations)
        if (!is_rule(m)) {
            std::fprintf(stderr, "ftcomm-sim: no removable rule named %s\n", m.c_str());
            return 2;
        }
    if (mutations) return table_of_mutations(plan);
    if (one && trace) return run_traced(plan.first, plan.mutations) ? 0 : 1;
    if (plan.only_replay)
        for (const auto* name : kNotUnderReplay) std::erase(expected, name);
    if (one) plan.count = 1, plan.jobs = 1, expected.clear();
    return many(plan, expected);
}
