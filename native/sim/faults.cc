// What goes wrong and when: crashes, stops, cuts, an authority in trouble, at a step of the script or in the middle of a recovery.
#include <algorithm>
#include <cstring>

#include "sim/world.h"

namespace ftcomm::sim {

void World::on_event(Instance& who, const NodeEvent& e) {
    trace_.text(now(), "%d.%u event %s slot %d epoch %llu comm %llu seq %llu attempt %u %s %s", who.slot, who.incarnation,
                to_string(e.kind), e.slot, static_cast<unsigned long long>(e.epoch), static_cast<unsigned long long>(e.comm),
                static_cast<unsigned long long>(e.seq), e.attempt, e.ranks.text().c_str(), e.text.c_str());
    counters_.add((std::string("event ") + to_string(e.kind)).c_str());
    checker_.event(who, e);
    switch (e.kind) {
        case NodeEvent::Kind::Frozen: happens(Trigger::Frozen, who, -1); break;
        case NodeEvent::Kind::Decided: happens(Trigger::Decided, who, -1); break;
        case NodeEvent::Kind::Suspected: happens(Trigger::Suspected, who, -1); break;
        case NodeEvent::Kind::ViewChanged:
            happens(Trigger::ViewChanged, who, -1);
            who.program->somebody_is_gone();
            break;
        case NodeEvent::Kind::CaughtUp: happens(Trigger::CaughtUp, who, who.slot); break;
        case NodeEvent::Kind::JoinWaiting: happens(Trigger::JoinWaiting, who, e.slot); break;
        case NodeEvent::Kind::Joined: happens(Trigger::Joined, who, e.slot); break;
        case NodeEvent::Kind::Removed: {
            detection_.removed(who, e);
            // Voted out while it only sleeps: its replacement starts all the same (M9).
            Instance* out = newest(e.slot);
            if (scenario_.replay && out->running() && out->incarnation == e.incarnation)
                queue_.push(now() + random_.between(10 * kMs, kHeartbeat), EventKind::Spawn, e.slot,
                            static_cast<int>(e.incarnation));
            else if (scenario_.joinable[static_cast<std::size_t>(e.slot)] && out->running() && out->stopped_until > now() &&
                     out->incarnation == e.incarnation && random_.chance(0.3))
                queue_.push(now() + random_.between(10 * kMs, kHeartbeat), EventKind::Spawn, e.slot);
            break;
        }
        default: break;
    }
}

// Steps of a join that no event tells of.
void World::on_transition(Instance& who, const char* name) {
    if (std::strcmp(name, "admit.vote") == 0) happens(Trigger::AdmitVote, who, -1);
    else if (std::strcmp(name, "admit.decide") == 0) happens(Trigger::AdmitDecide, who, -1);
    else if (std::strcmp(name, "goodbye") == 0) who.program->somebody_is_gone();
}

void World::happens(Trigger trigger, Instance& emitter, int subject) {
    if (safety_over_) return;
    const int nth = ++event_counts_[static_cast<std::size_t>(trigger)];
    for (auto& fault : faults_) {
        if (!fault.fired && fault.trigger == trigger && fault.nth <= nth) {
            counters_.add("inject fault during a recovery");
            in_recovery_ = true;
            fire(fault, &emitter, subject);
        }
    }
}

void World::begins_group(Instance& who, int group) {
    if (safety_over_) return;
    for (auto& fault : faults_) {
        if (fault.fired) continue;
        // One whose own time never came (its rank is dead, nothing was recovered) comes late.
        const bool at_group = fault.trigger == Trigger::Group;
        const bool late = at_group ? fault.group < group : group >= scenario_.group_count() * 3 / 4;
        if (late) fault.commits = 0;  // or the script ends first
        if ((at_group && fault.slot == who.slot && fault.group <= group) || late) fire(fault, nullptr, -1);
    }
}

void World::fire(Fault& f, Instance* emitter, int subject) {
    if (f.fired) return;
    if (ends_the_job(f) && injected_ == 0) return;  // not the first: it comes when its trigger does again
    f.fired = true;
    Instance* victim = newest(f.slot);
    if (f.at_emitter && emitter != nullptr) victim = emitter;
    if (f.at_subject && subject >= 0) victim = newest(subject);
    const bool crash = f.kind == FaultKind::Crash || f.kind == FaultKind::CrashHost;
    const auto fit = [&](const Instance& i) {
        return i.running() && !i.was_stale && (!crash || (i.crash_after < 0 && i.stopped_until <= now()));
    };
    if (victim == nullptr || !fit(*victim)) {
        victim = nullptr;
        for (auto& i : instances_)
            if (fit(*i)) victim = i.get();
    }
    for (auto& i : instances_)
        if (victim == nullptr && i->running()) victim = i.get();  // better one that is out already than none
    if (victim == nullptr) return;
    carry_out(f, *victim);
}

void World::carry_out(const Fault& f, Instance& victim) {
    trace_.text(now(), "fault %s of %d.%u", to_string(f.kind), victim.slot, victim.incarnation);
    const auto host = [&](int slot) { return scenario_.hosts[static_cast<std::size_t>(slot)]; };
    const bool one_host = host(0) == host(scenario_.ranks - 1);
    const Time until = now() + f.duration;
    auto kind = f.kind;
    // Ranks of one host share memory: there is no link to cut. And somebody must be left to notice a lost host.
    if ((kind == FaultKind::CutLink || kind == FaultKind::Reset) && host(f.other) == host(victim.slot)) {
        if (scenario_.quiet) return;
        kind = FaultKind::Stop;
    }
    if ((kind == FaultKind::Isolate || kind == FaultKind::Firewall) && one_host) kind = FaultKind::Stop;
    if (kind == FaultKind::CrashHost && one_host) kind = FaultKind::Crash;
    if (kind == FaultKind::Crash && is_last(victim)) kind = FaultKind::Stop;
    if (kind != FaultKind::Crash) {
        counters_.add((std::string("inject ") + to_string(kind)).c_str());
        ++injected_;
        if (kind != FaultKind::CrashHost && kind != FaultKind::Firewall) detection_.disturbed();
        if (kind != FaultKind::CrashHost) quiet_after_ = std::max(quiet_after_, until);
    }
    switch (kind) {
        case FaultKind::Crash:
            if (victim.crash_after < 0) victim.crash_after = f.commits;
            break;
        case FaultKind::CrashHost: lose_host(victim); break;
        case FaultKind::CrashAll:
            for (auto& i : instances_)
                if (i->running()) queue_.push(now() + random_.between(0, 2 * kMs), EventKind::Killed, i->id);
            break;
        case FaultKind::Stop:
            victim.stop_after = f.commits;
            victim.stop_for = f.duration;
            break;
        case FaultKind::CutLink:
            links_.cut(victim.slot, f.other, until);
            if (f.both) links_.cut(f.other, victim.slot, until);
            break;
        case FaultKind::Isolate: isolate(f, victim); break;
        case FaultKind::Firewall: firewall(f, victim); break;
        case FaultKind::Reset: {  // and the link is back at once
            Instance* other = newest(f.other);
            if (other == nullptr || !other->running()) break;
            links_.cut(victim.slot, f.other, until);
            links_.cut(f.other, victim.slot, until);
            queue_.push(now(), EventKind::Evidence, victim.id, other->id, static_cast<int>(Evidence::Reset));
            if (f.both) queue_.push(now(), EventKind::Evidence, other->id, victim.id, static_cast<int>(Evidence::Reset));
            queue_.push(until, EventKind::Heard, victim.id, other->id);
            queue_.push(until, EventKind::Heard, other->id, victim.id);
            break;
        }
        case FaultKind::AuthoritySlow:
            store_.slow_until = until;
            store_.slow_by = random_.between(kMs, 2 * kHeartbeat);
            break;
        case FaultKind::AuthorityUnknown: store_.unknown_next += static_cast<int>(random_.between(1, 4)); break;
        case FaultKind::AuthorityLost: store_.lost = true; break;
        case FaultKind::AuthorityBlank: store_.restart_blank(); break;
        case FaultKind::Pause:
            for (auto& i : instances_)
                if (i->running()) i->stopped_until = std::max(i->stopped_until, until);
            for (int a = 0; a < scenario_.ranks; ++a)
                for (int b = 0; b < scenario_.ranks; ++b) links_.cut(a, b, until);
            break;
    }
}

void World::lose_host(const Instance& victim) {
    const int number = detection_.host_lost();
    Time after = 0;
    for (auto& i : instances_) {
        if (!i->running() || !same_host(i->slot, victim.slot)) continue;
        queue_.push(now() + after, EventKind::HostDeath, i->id, number);
        after = random_.between(0, kHeartbeat * 35 / 100);
    }
}

void World::isolate(const Fault& f, const Instance& victim) {
    const auto host = [&](int slot) { return scenario_.hosts[static_cast<std::size_t>(slot)]; };
    const Time until = now() + f.duration;
    std::map<std::uint64_t, bool> side;
    for (auto h : scenario_.hosts) side.try_emplace(h, random_.chance(0.5));
    side[host(victim.slot)] = true;
    if (std::all_of(side.begin(), side.end(), [](const auto& s) { return s.second; })) side[host(victim.slot)] = false;
    for (int a = 0; a < scenario_.ranks; ++a)
        for (int b = 0; b < scenario_.ranks; ++b)
            if (side[host(a)] != side[host(b)] && (f.both || side[host(a)])) links_.cut(a, b, until);
}

// One host behind a firewall that answers with resets: at both ends it looks as if the other side had gone.
void World::firewall(const Fault& f, const Instance& victim) {
    RankSet inside, outside;
    for (auto& i : instances_)
        if (i->running() && !i->was_stale && !i->program->joining())
            (same_host(i->slot, victim.slot) ? inside : outside).add(i->slot);
    detection_.cut_off(inside, outside);
    for (int a : inside.list()) {
        for (int b : outside.list()) {
            links_.cut(a, b, now() + f.duration);
            links_.cut(b, a, now() + f.duration);
            const auto reset = [&](int to, int about) {
                const Time first = now() + random_.between(0, 30 * kMs);
                for (Time again : {Time{0}, kHeartbeat / 40, kHeartbeat / 10})
                    queue_.push(first + again, EventKind::Evidence, newest(to)->id, newest(about)->id,
                                static_cast<int>(Evidence::Reset));
            };
            reset(a, b);
            reset(b, a);
        }
    }
}

// From here on nothing more goes wrong: every call must end.
void World::end_safety() {
    safety_over_ = true;
    trace_.text(now(), "the safety phase ends");
    for (auto& i : instances_) {
        i->crash_after = i->stop_after = -1;
        i->stopped_until = std::min(i->stopped_until, now());
        i->hold_until = std::min(i->hold_until, now());
    }
    store_.slow_until = 0;
    store_.unknown_next = 0;
    links_.heal_all();
}

}  // namespace ftcomm::sim
