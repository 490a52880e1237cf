#include "sim/mutations.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace ftcomm::sim {

namespace {

struct Rule {
    const char* name;
    const char* text;
    std::uint64_t first = 0;  // of one that is rarely caught: the table begins to look here
};
// M5, M7 and M9 are about real processes and real memory: tests/native and tests/direct break those. M15 needs a view that is lost with
// all who could pass it on and a rank that nothing else brings it to: native/tests/test_node_spread.cc has that.
constexpr Rule kRules[] = {
    {"C1", "freeze at the vote"},
    {"C2", "a final carries its contributors"},
    {"C3", "a repair has its own fence"},
    {"C4", "vote by segment"},
    {"C5", "late entrants follow the plan"},
    {"C6", "fence-less results are kept"},
    {"C7", "the vote decides under raise, too"},
    {"C8", "the algorithm is part of the operation"},
    {"C9", "a read counts only while its ticket stands"},
    {"C10", "what is lent is taken back"},
    {"M1", "one authority"},
    {"M2", "lineage"},
    {"M3", "a blank store is not the store"},
    {"M4", "decide, record, then act"},
    {"M6", "a reset is no proof of death"},
    {"M8", "fence incarnations"},
    {"M10", "goodbye"},
    {"M11", "suspicions are not added up"},
    {"M12", "suspect per host"},
    {"M13", "join at a join point"},
    {"M14", "the winner of a view tells all", 6350},
    {"M16", "a record is passed on in its sender's view", 4170},
    {"M17", "a vote along a tree counts in its view", 11500},
    {"L1", "replay skips sending, never logging"},
    {"L2", "a restart voids its checkpoint vote"},
    {"L3", "no checkpoint while a message is under way"},
    {"L4", "two generations are kept"},
    {"L5", "answers from ANY are on record"},
    {"L6", "what comes before the resume point stays"},
    {"L7", "what is done again is done by the same owners"},
    {"L11", "a result is logged before its fence begins"},
    {"L12", "the last logged result counts when the vote says so"},
    {"L13", "given up only when all have acknowledged"},
    {"L14", "a mark proves the commit", 6300},
    {"L15", "nothing is late beyond a mark"},
    {"L16", "a note holds with all that comes before it"},
    {"G1", "who dies takes its log group along"},
    {"G2", "a log group goes on from one checkpoint"},
};

// The first seed of [plan.first, plan.first + plan.count) that breaks without the rule and holds with it.
Finding first_caught(const RunPlan& plan) {
    const std::uint64_t step = 64 * static_cast<std::uint64_t>(plan.jobs);
    for (std::uint64_t at = 0; at < plan.count; at += step) {
        RunPlan part = plan;
        part.first = plan.first + at;
        part.count = std::min(step, plan.count - at);
        for (auto& f : run_seeds(part, [](const Finding&) {}).findings) {
            RunPlan whole = part;
            whole.mutations.clear();
            whole.first = f.seed;
            whole.count = 1;
            if (run_seeds(whole, [](const Finding&) {}).findings.empty()) return f;
        }
    }
    return {};
}

}  // namespace

bool is_rule(const std::string& name) {
    return std::any_of(std::begin(kRules), std::end(kRules), [&](const Rule& r) { return name == r.name; });
}

int table_of_mutations(const RunPlan& plan) {
    int missed = 0;
    std::printf("| rule | seeds until caught | by | first violation |\n|---|---|---|---|\n");
    for (const auto& rule : kRules) {
        RunPlan without = plan;
        without.mutations = {rule.name};
        without.first += rule.first;
        const Finding f = first_caught(without);
        if (f.invariant.empty()) {
            ++missed;
            std::printf("| %s %s | not caught in %" PRIu64 " | | |\n", rule.name, rule.text, plan.count);
        } else {
            std::string what = f.text.substr(0, std::min<std::size_t>(f.text.find('\n'), 160));
            std::replace(what.begin(), what.end(), '|', '/');
            std::printf("| %s %s | %" PRIu64 " | %s | %s |\n", rule.name, rule.text, f.seed - plan.first + 1, f.invariant.c_str(),
                        what.c_str());
        }
        std::fflush(stdout);
    }
    if (missed > 0) std::printf("%d rules were not caught\n", missed);
    return missed == 0 ? 0 : 1;
}

}  // namespace ftcomm::sim
