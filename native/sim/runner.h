// Runs seeds in forked children, so that an assertion that stops the protocol is one more way to be caught.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace ftcomm::sim {

struct Finding {
    std::uint64_t seed = 0;
    std::string invariant;   // a letter of the list, or CHECK (an assertion), HANG (no return)
    std::string text;
};

struct RunPlan {
    std::uint64_t first = 0, count = 0;
    int jobs = 2;
    bool stop_at_first = false;
    bool only_replay = false;                        // seeds of other kinds are left out
    std::vector<std::string> mutations;
};

struct RunResult {
    std::uint64_t seeds = 0;
    std::vector<Finding> findings;                   // ascending seeds
    std::map<std::string, std::uint64_t> counters;
    double seconds = 0;
};

RunResult run_seeds(const RunPlan& plan, const std::function<void(const Finding&)>& found);

// In this process, printing every event.
bool run_traced(std::uint64_t seed, const std::vector<std::string>& mutations);

}  // namespace ftcomm::sim
