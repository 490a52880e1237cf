// How ranks end: in the middle of a burst, with their host, by leaving; and who is told of it.
#include "sim/left_windows.h"
#include "sim/world.h"

namespace ftcomm::sim {

bool World::may_send(Instance& who) {
    if (who.crashed) return false;
    if (who.crash_after == 0) {
        if (is_last(who)) {
            who.crash_after = -1;  // the last one stays, and only stops for a while
            who.hold_until = who.stopped_until = now() + kHeartbeat;
            ++injected_;
            return true;
        }
        who.crashed = true;
        for (auto& window : windows_)  // its input goes on, and nobody is to see that
            if (window.owner == who.id && window.bytes <= Transport::kSmallWindow)
                who.left_windows.emplace_back(window.memory.get(),
                                              Bytes(window.memory.get(), window.memory.get() + window.bytes));
        return false;
    }
    if (who.crash_after > 0) --who.crash_after;
    if (who.stop_after == 0) {
        who.stop_after = -1;
        who.hold_until = who.stopped_until = now() + who.stop_for;
        counters_.add("inject stop in the middle of a burst");
        trace_.text(now(), "%d.%u stops until %.6f", who.slot, who.incarnation, static_cast<double>(who.stopped_until) * 1e-9);
    } else if (who.stop_after > 0) {
        --who.stop_after;
    }
    return true;
}

void World::died(Instance& who) {
    trace_.text(now(), "%d.%u dies", who.slot, who.incarnation);
    counters_.add(who.lost_host >= 0 ? "inject crash with host" : "inject crash");
    if (who.lost_host < 0 || who.crash_after >= 0) ++injected_;
    if (who.node != nullptr && who.node->late_records() > 0) counters_.add("inject crash with late records");
    who.crashed = true;
    who.just_completed.clear();
    killed(who);
    tell_of_exit(who, who.lost_host >= 0);
    detection_.died(who);
    look_for_survivors();
}

void World::killed(Instance& who) {
    std::vector<std::byte*> shown;
    for (auto& window : windows_)
        if (window.owner == who.id) shown.push_back(window.memory.get());
    end_as_if_killed(shown, [&] { who.node.reset(); });
    for (const auto& [at, bytes] : who.left_windows) std::ranges::copy(bytes, at);
}

// As soon as one of those left has heard of it (ShmTransport::discard_windows).
void World::discard_windows(int owner) {
    constexpr std::size_t kHead = Transport::kWindowHead;
    for (auto& window : windows_) {
        if (window.owner != owner) continue;
        std::fill_n(window.memory.get(), sizeof(std::uint64_t), std::byte{0});
        if (window.bytes > Transport::kSmallWindow) std::fill_n(window.memory.get() + kHead, kHead, std::byte{0});
    }
}

// Its ranks stop one after another, and nobody on it is left to say so.
void World::host_death(Instance& who, int lost_host) {
    if (!who.running()) return;
    if (is_last(who)) {
        detection_.disturbed();
        return;
    }
    who.lost_host = lost_host;
    died(who);
}

void World::leaves(Instance& who) {
    if (who.crash_after > 0) who.crash_after = 0;
}

void World::exited(Instance& who) {
    if (!who.running()) return;
    if (running_count() < 2 && !safety_over_)
        for (auto& fault : faults_) fire(fault, nullptr, -1);  // the last chance
    detection_.exited();
    if (who.crash_after >= 0) {  // it was to die before
        died(who);
        return;
    }
    trace_.text(now(), "%d.%u exits%s", who.slot, who.incarnation, who.left ? " after leave" : "");
    const bool with_group = !who.left && who.node->left_with_group();
    counters_.add(who.left     ? "inject leave and exit"
                  : with_group ? "inject exit with its log group"
                               : "inject exit of a voted-out rank");
    if (with_group) ++injected_;
    who.crashed = !who.left;
    // All have come to the end of their programs. What goes wrong from here on is the launcher's to judge: it starts nobody again.
    if (scenario_.replay && who.left && !safety_over_) end_safety();
    who.node.reset();
    tell_of_exit(who, false);
    look_for_survivors();
}

void World::tell_of_exit(Instance& who, bool host_gone) {
    const auto near = [&](const Instance& i) { return same_host(i.slot, who.slot); };
    if (host_gone) links_.drop_tails(who);
    bool fellow = agents_;
    for (auto& i : instances_) fellow = fellow || (i->running() && near(*i));
    for (auto& i : instances_) {
        if (!i->running() || i->slot == who.slot || host_gone) continue;
        if (near(*i)) {
            const auto kind = random_.chance(0.7) ? Evidence::RobustFutex : Evidence::Pidfd;
            const Time after =
                kind == Evidence::RobustFutex ? random_.between(100 * kUs, 1100 * kUs) : random_.between(kMs, 80 * kMs);
            queue_.push(now() + after, EventKind::Evidence, i->id, who.id, static_cast<int>(kind));
        } else if (who.left) {
            continue;  // an agent, or a fellow rank that has read the goodbye, reports no death
        } else if (fellow) {
            queue_.push(now() + random_.between(kMs, 50 * kMs), EventKind::Evidence, i->id, who.id,
                        static_cast<int>(Evidence::Agent));
        } else if (random_.chance(0.3)) {
            const Time first = now() + random_.between(kMs, 50 * kMs);
            for (Time again : {Time{0}, kHeartbeat / 40, kHeartbeat / 10})
                queue_.push(first + again, EventKind::Evidence, i->id, who.id, static_cast<int>(Evidence::Reset));
        }
    }
    if (scenario_.joinable[static_cast<std::size_t>(who.slot)] && !who.left && newest(who.slot) == &who)
        queue_.push(now() + random_.between(10 * kMs, 3 * kHeartbeat), EventKind::Spawn, who.slot,
                    static_cast<int>(who.incarnation));
}

void World::evidence(Instance& observer, Instance& about, Evidence kind) {
    if (!observer.running()) return;
    // Whoever reports an exit on its own host has read the dead rank's channel first (M10).
    if (same_host(observer.slot, about.slot) && kind != Evidence::Reset) links_.drain(about, observer, false);
    trace_.text(now(), "%d.%u is told: %d.%u %s", observer.slot, observer.incarnation, about.slot, about.incarnation,
                to_string(kind));
    input(observer, [&](Node& node, Time at) { node.on_evidence(at, about.slot, about.incarnation, kind); });
}

}  // namespace ftcomm::sim
