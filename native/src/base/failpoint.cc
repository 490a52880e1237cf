#include "base/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <ctime>
#include <mutex>
#include <vector>

#include "base/failpoint_spec.h"
#include "base/failpoint_stop.h"
#include "base/failpoint_table.h"
#include "base/failpoint_words.h"

namespace ftcomm::fault {

std::atomic<bool> armed{false};

namespace {

struct Armed {
    Fault fault;
    std::uint64_t passes = 0;
    bool spent = false;  // each entry acts once
};

struct State {
    std::mutex mutex;
    std::vector<Armed> faults;
    std::uint64_t step = 0;
    bool stepped = false;
};

// Never destroyed: threads may pass points while the process exits.
State& state() {
    static State& s = *new State;
    return s;
}

// Under the mutex: the faults whose turn has come with this pass, in the order of the spec.
std::vector<Fault> due(State& s, int point) {
    static const int step_point = find_point("step");
    std::vector<Fault> out;
    for (auto& armed : s.faults) {
        const Fault& fault = armed.fault;
        if (armed.spent || fault.point != point) continue;
        if (point == step_point) {
            // Reached, not met exactly: a replacement may come in at a later step.
            if (!s.stepped || s.step < fault.nth) continue;
        } else {
            if (fault.has_step && (!s.stepped || s.step < fault.step)) continue;
            if (++armed.passes < fault.nth) continue;
        }
        armed.spent = true;
        out.push_back(fault);
    }
    return out;
}

void delay(double seconds) {
    timespec left{};
    left.tv_sec = static_cast<time_t>(seconds);
    left.tv_nsec = std::lround((seconds - std::floor(seconds)) * 1e9) % 1'000'000'000;
    while (nanosleep(&left, &left) != 0) {}
}

Verdict act(const Fault& fault) {
    switch (fault.deed) {
        case Deed::Kill:
            last_words(fault);
            kill(getpid(), SIGKILL);
            for (;;) pause();  // another thread may run on for a moment; this one must not
        case Deed::Exit: last_words(fault); _exit(fault.argument);
        case Deed::Stop: stop_for(fault.seconds); return {};
        case Deed::Delay: delay(fault.seconds); return {};
        case Deed::Corrupt: return {Action::Corrupt, 0};
        case Deed::Cut: return {Action::Cut, fault.argument};
    }
    return {};
}

// Outside the mutex: a delay in one thread must not hold up the points of another.
Verdict act_all(const std::vector<Fault>& faults) {
    Verdict verdict;
    for (const auto& fault : faults)
        if (auto v = act(fault); v.action != Action::None) verdict = v;
    return verdict;
}

}  // namespace

Status configure(const std::string& spec, int rank, int incarnation) {
    std::vector<Fault> faults;
    if (auto status = parse_faults(spec, &faults); !status) return status;
    State& s = state();
    std::lock_guard lock(s.mutex);
    s.faults.clear();
    s.step = 0;
    s.stepped = false;
    for (const auto& fault : faults)
        if (fault.rank == rank && fault.incarnation == incarnation) s.faults.push_back({fault});
    armed.store(!s.faults.empty(), std::memory_order_relaxed);
    return {};
}

Verdict hit(const char* name) {
    const int point = find_point(name);
    if (point < 0) return {};  // from Python code; a test checks the names in ours
    State& s = state();
    std::vector<Fault> faults;
    {
        std::lock_guard lock(s.mutex);
        faults = due(s, point);
    }
    return act_all(faults);
}

void set_step(std::uint64_t step) {
    if (!armed.load(std::memory_order_relaxed)) return;
    State& s = state();
    {
        std::lock_guard lock(s.mutex);
        s.step = step;
        s.stepped = true;
    }
    hit("step");
}

std::vector<Missed> missed() {
    std::size_t count = 0;
    const PointInfo* points = all_points(&count);
    State& s = state();
    std::lock_guard lock(s.mutex);
    std::vector<Missed> out;
    for (const auto& armed : s.faults) {
        const Fault& fault = armed.fault;
        if (armed.spent) continue;
        out.push_back(
            {std::string(points[fault.point].name) + ":" + std::to_string(fault.nth), fault.step, fault.has_step, armed.passes});
    }
    return out;
}

}  // namespace ftcomm::fault
