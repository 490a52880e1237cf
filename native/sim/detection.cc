#include "sim/detection.h"

#include "sim/world.h"

namespace ftcomm::sim {

namespace {
// A heartbeat of silence, the largest wait of M11 (0.3), ticks, the cell; well below two heartbeats.
constexpr Time kBound = kHeartbeat * 19 / 10;
}  // namespace

Detection::Detection(World& world) : world_(world) {
    const auto& s = world.scenario();
    calm_ = s.network.spike_high <= kHeartbeat / 20 && s.network.cell_high <= 3 * kMs && !s.joins && !s.replay;
}

void Detection::disturbed() {
    calm_ = false;
    smaller_ = larger_ = {};
}

void Detection::died(const Instance& dead) {
    larger_.remove(dead.slot);
    weigh_sides();
    deaths_.push_back({world_.now(), dead.lost_host});
    if (calm_) world_.queue().push(world_.now() + kBound, EventKind::Detected, dead.id);
}

// L: a silent rank is out of every view within one heartbeat and a share of another for the wait of M11, and so is a host, however
// many ranks it had (M12).
void Detection::check(const Instance& dead) {
    if (!calm_) return;
    const Time since = world_.now() - kBound;
    for (const auto& d : deaths_) {
        const bool together = d.at == since || (d.lost_host >= 0 && d.lost_host == dead.lost_host);
        if (!together && d.at > since - 3 * kHeartbeat) return;  // each view change starts the clocks again
    }
    for (auto& i : world_.instances()) {
        if (!i->running() || i->was_stale || i->program->joining() || i->view.empty()) continue;
        if (i->view.has(dead.slot) && i->node->incarnation_of(dead.slot) == dead.incarnation)
            world_.violate("L", "slot %d still counts on slot %d, dead for %.3f s", i->slot, dead.slot,
                           static_cast<double>(kBound) * 1e-9);
    }
}

void Detection::removed(const Instance& by, const NodeEvent& e) {
    const Instance* out = world_.find(e.slot, e.incarnation);
    if (out == nullptr || is_confirmed(e.evidence)) return;
    // M12: ranks of a host that fall silent within half a heartbeat are one complaint, settled by one view change.
    if (calm_ && out->lost_host >= 0 && e.evidence == Evidence::Heartbeat) {
        const auto [it, first] = left_in_.try_emplace({by.id, out->lost_host}, e.epoch);
        if (!first && it->second != e.epoch)
            world_.violate("L", "slot %d: a lost host left the view in epochs %llu and %llu (slot %d), one heartbeat each",
                           by.slot, static_cast<unsigned long long>(it->second), static_cast<unsigned long long>(e.epoch),
                           e.slot);
        if (first) world_.counters().add("check lost host left in one view change");
    }
    // M6, M11: resets at both ends of a cut tell both sides alike; the side that reaches more ranks decides.
    if (larger_.has(e.slot) && out->running())
        world_.violate("V", "the smaller side %s of a cut voted out slot %d of the larger %s (%s)", smaller_.text().c_str(),
                       e.slot, larger_.text().c_str(), to_string(e.evidence));
    if (smaller_.has(e.slot)) world_.counters().add("check smaller side of a cut voted out");
}

void Detection::cut_off(const RankSet& smaller, const RankSet& larger) {
    const bool calm = calm_;
    disturbed();
    if (calm) smaller_ = smaller, larger_ = larger;
    weigh_sides();
}

// By less than this, ticks and the cell's delay may decide.
void Detection::weigh_sides() {
    if (smaller_.count() * 3 > larger_.count()) smaller_ = larger_ = {};
}

}  // namespace ftcomm::sim
