// Checkpoints in a scenario of the policy replay: a resume point, and commits between the groups behind it. In half of the seeds; the others
// keep their whole log. Drawn by themselves, so that the other draws of a seed stay as they were.
#include <algorithm>

#include "sim/data.h"
#include "sim/scenario_draw.h"

namespace ftcomm::sim {

namespace {

// Whether messages of a WebSend before step `end` are received at or after it.
bool under_way(const Scenario& s, int end, bool even_none) {
    for (int i = end; i < static_cast<int>(s.steps.size()); ++i) {
        const auto& step = s.steps[static_cast<std::size_t>(i)];
        if (step.kind != StepKind::WebReceive || step.of >= end) continue;
        if (even_none) return true;
        const int size = static_cast<int>(s.comms[static_cast<std::size_t>(step.comm)].members.size());
        for (int from = 0; from < size; ++from)
            for (int to = 0; to < size; ++to)
                if (message_count(step, step.of, from, to) > 0) return true;
    }
    return false;
}

}  // namespace

void draw_checkpoints(Scenario& s) {
    Random r(s.seed ^ 0xc4ec7ULL);
    if (!r.chance(0.5)) return;
    std::vector<int> candidates{0};
    for (int g = 1; g <= s.group_count() / 3; ++g)
        if (!under_way(s, s.groups[static_cast<std::size_t>(g)], true)) candidates.push_back(g);
    s.resume_group = r.pick(candidates);
    if (r.chance(0.4)) s.may_lose_all = true;  // then only the logs know what was committed
    s.notes = Random(s.seed ^ 0x407e5ULL).chance(0.6);
    // One communicator has checkpoints: what others did behind the resume point could not be left out.
    for (int i = s.groups[static_cast<std::size_t>(s.resume_group)]; i < static_cast<int>(s.steps.size()); ++i)
        s.steps[static_cast<std::size_t>(i)].comm = 0;
    std::vector<Step> steps;
    std::vector<int> groups, now(s.steps.size());
    for (int g = 0; g < s.group_count(); ++g) {
        const int first = s.groups[static_cast<std::size_t>(g)];
        if (g > s.resume_group && r.chance(0.55)) {
            Step commit;
            commit.kind = StepKind::Commit;
            groups.push_back(static_cast<int>(steps.size()));
            steps.push_back(commit);
        }
        groups.push_back(static_cast<int>(steps.size()));
        for (int i = first; i < s.groups[static_cast<std::size_t>(g) + 1]; ++i) {
            now[static_cast<std::size_t>(i)] = static_cast<int>(steps.size());
            steps.push_back(s.steps[static_cast<std::size_t>(i)]);
            auto& of = steps.back().of;
            if (of >= 0) of = now[static_cast<std::size_t>(of)];
        }
    }
    groups.push_back(static_cast<int>(steps.size()));
    s.steps = std::move(steps);
    s.groups = std::move(groups);
    for (int i = 0; i < static_cast<int>(s.steps.size()); ++i)
        if (auto& step = s.steps[static_cast<std::size_t>(i)]; step.kind == StepKind::Commit)
            step.refused = under_way(s, i, false);
}

// Ranks die while a checkpoint is committed, and soon after it.
void aim_at_checkpoints(Scenario& s) {
    if (s.resume_group < 0) return;
    Random r(s.seed ^ 0xa1aa7ULL);
    std::vector<int> commits;
    for (int g = 0; g < s.group_count(); ++g)
        if (s.steps[static_cast<std::size_t>(s.groups[static_cast<std::size_t>(g)])].kind == StepKind::Commit)
            commits.push_back(g);
    if (commits.empty()) return;
    for (auto& f : s.faults) {
        if (f.trigger != Trigger::Group || !r.chance(0.6)) continue;
        f.group = std::min(r.pick(commits) + (r.chance(0.7) ? 0 : 1), s.group_count() - 1);
        f.commits = static_cast<int>(r.below(20));
        if (s.may_lose_all && r.chance(0.4)) f.kind = FaultKind::CrashAll;
    }
}

}  // namespace ftcomm::sim
