#include "sim/world.h"

#include <algorithm>
#include <cstdarg>

namespace ftcomm::sim {

namespace {
constexpr std::uint64_t kMaxEvents = 8'000'000;
}

void Instance::event(const NodeEvent& e) {
    if (!crashed) world.on_event(*this, e);
}
void Instance::completed(const RequestPtr& request) {
    if (!crashed) just_completed.push_back(request);
}
void Instance::trace(const char* transition) { world.counters().add(transition); }

World::World(const Scenario& scenario, const std::vector<std::string>& mutations, Counters& counters, bool live_trace)
    : scenario_(scenario),
      faults_(scenario.faults),
      mutations_(mutations),
      counters_(counters),
      trace_(live_trace),
      random_(scenario.seed ^ 0x51f15eedULL),
      links_(*this, Random(scenario.seed ^ 0x11e75ULL)),
      store_(*this, Random(scenario.seed ^ 0xce11ULL)),
      checker_(*this),
      event_counts_(32, 0) {
    const std::string job = "sim";
    initial_view_ =
        Node::make_initial_view(job, store_.boot, std::vector<std::uint32_t>(static_cast<std::size_t>(scenario.ranks), 0));
    store_.create(Node::view_key(job), initial_view_);
    agents_ = random_.chance(0.5);
    const auto& net = scenario.network;
    calm_ = net.spike_high <= kHeartbeat / 20 && net.cell_high <= 3 * kMs && !scenario.joins;
    for (int slot = 0; slot < scenario.ranks; ++slot) start(slot, 0);
    queue_.push(now() + 60 * kHeartbeat, EventKind::EndSafety);
    last_progress_ = now();
}

bool World::mutated(const char* rule) const { return std::find(mutations_.begin(), mutations_.end(), rule) != mutations_.end(); }

Instance* World::find(int slot, std::uint32_t incarnation) {
    for (auto& i : instances_)
        if (i->slot == slot && i->incarnation == incarnation) return i.get();
    return nullptr;
}

Instance* World::newest(int slot) {
    Instance* best = nullptr;
    for (auto& i : instances_)
        if (i->slot == slot) best = i.get();
    return best;
}

Instance& World::start(int slot, std::uint32_t incarnation) {
    instances_.push_back(std::make_unique<Instance>(*this, static_cast<int>(instances_.size()), slot, incarnation));
    Instance& who = *instances_.back();
    for (int s = 0; s < scenario_.ranks; ++s) {
        const Instance* other = newest(s);
        who.known_incarnations.push_back(other == nullptr ? 0 : other->incarnation);
    }
    NodeConfig c;
    c.job = "sim";
    c.slot = slot;
    c.incarnation = incarnation;
    c.world_size = scenario_.ranks;
    c.joining = incarnation > 0;
    c.boot = 77;
    c.seed = scenario_.seed * 1000 + static_cast<std::uint64_t>(who.id);
    c.heartbeat = kHeartbeat;
    c.timeout = 1000 * kHeartbeat;
    c.hosts = scenario_.hosts;
    c.flat_limit = scenario_.flat_limit;
    c.segment_bytes = scenario_.segment_bytes;
    c.eager_limit = scenario_.eager_limit;
    for (const auto& m : mutations_)
        if (m != "M9") c.mutations.push_back(m);  // M9 is the transport's
    c.initial_view = initial_view_;
    who.program = std::make_unique<Program>(*this, who);
    who.view = RankSet::first(scenario_.ranks);
    who.node = std::make_unique<Node>(c, who.transport, who.authority, who, now());
    who.program->start();
    queue_.push(now() + random_.between(0, who.node->tick_interval()), EventKind::Tick, who.id);
    links_.instance_started(who);
    return who;
}

void World::run() {
    while (!queue_.empty() && !violation_.found()) {
        if (all_done()) break;
        if (++events_ > kMaxEvents) {
            violate("L", "no end after %llu events: %s", static_cast<unsigned long long>(events_), stuck().c_str());
            return;
        }
        dispatch(queue_.pop());
    }
    if (!violation_.found()) checker_.finish();
    counters_.add("events", events_);
    counters_.add("virtual milliseconds", static_cast<std::uint64_t>(now() / kMs));
}

void World::dispatch(const Event& e) {
    switch (e.kind) {
        case EventKind::Deliver: links_.deliver(e.a); break;
        case EventKind::Writable: links_.writable(e.a); break;
        case EventKind::CellRequest: store_.reached(e.a); break;
        case EventKind::CellReply: store_.answered(e.a); break;
        case EventKind::Tick: tick(instance(e.a)); break;
        case EventKind::Evidence: {
            Instance& observer = instance(e.a);
            if (observer.running() && observer.stopped_until > now())
                queue_.push(observer.stopped_until + random_.between(0, 50 * kUs), e.kind, e.a, e.b, e.c);
            else evidence(observer, instance(e.b), static_cast<Evidence>(e.c));
            break;
        }
        case EventKind::Spawn: {
            const Instance* old = newest(e.a);
            bool anybody = false;
            for (auto& i : instances_) anybody = anybody || (i->running() && !i->was_stale && !i->program->joining());
            if (!anybody || old->incarnation >= 4 || (old->running() && !old->was_stale && old->stopped_until <= now())) break;
            Instance& fresh = start(e.a, old->incarnation + 1);
            counters_.add("inject replacement");
            trace_.text(now(), "%d.%u starts", fresh.slot, fresh.incarnation);
            break;
        }
        case EventKind::EndSafety: end_safety(); break;
        case EventKind::Detected: check_detected(instance(e.a)); break;
        case EventKind::Program:
        case EventKind::FailRequest:
        case EventKind::Revoke: {
            Instance& who = instance(e.a);
            if (!who.running()) break;
            if (who.stopped_until > now()) {
                queue_.push(who.stopped_until + random_.between(0, 50 * kUs), e.kind, e.a, e.b);
                break;
            }
            if (e.kind == EventKind::Program) who.program->run();
            if (e.kind == EventKind::FailRequest) who.program->fail_request(e.b);
            if (e.kind == EventKind::Revoke) who.program->revoke(e.b);
            break;
        }
    }
}

void World::tick(Instance& who) {
    if (!who.running()) return;
    if (who.stopped_until > now()) {
        queue_.push(who.stopped_until + random_.between(0, 50 * kUs), EventKind::Tick, who.id);
        return;
    }
    const Time interval = who.node->tick_interval();
    Time next = random_.between(interval * 7 / 10, interval);
    if (scenario_.network.spike > 0 && random_.chance(0.002)) {
        // Late by little, or by so much that the rank itself knows: a silent link and a late tick must not add up to a heartbeat.
        const Time late = random_.between(0, scenario_.network.spike_high);
        next += late < kHeartbeat / 10 ? late : std::max(late, kHeartbeat * 3 / 10);
    }
    queue_.push(now() + next, EventKind::Tick, who.id);
    input(who, [](Node& node, Time at) { node.on_tick(at); });
    // Signs of life: liveness words in shared memory, the transport's pings between hosts.
    for (std::size_t i = 0; i < instances_.size(); ++i) {
        Instance& other = *instances_[i];
        if (&other == &who || !other.running() || other.stopped_until > now() || !links_.clear(other, who)) continue;
        input(who, [&other](Node& node, Time at) { node.on_heard(at, other.slot, other.incarnation); });
    }
    check_stall();
}

void World::deliver(int from, Instance& to, Frame& frame, bool nested) {
    const Instance& sender = instance(from);
    const std::uint32_t incarnation = sender.incarnation;
    Instance& fresh = *newest(sender.slot);
    if (mutated("M9") && fresh.running() && links_.reuse_memory(sender, fresh, to, frame)) {
        counters_.add("inject late write of a voted-out rank");
        return;
    }
    if (&fresh != &sender) counters_.add("inject frame of a replaced incarnation");
    trace_.frame(now(), "recv", sender.slot, incarnation, to.slot, to.incarnation, frame.header);
    const auto hand_over = [&](Node& node, Time at) {
        node.on_frame(at, sender.slot, incarnation, frame.header, ByteView(frame.data.get(), frame.header.length));
    };
    if (nested) hand_over(*to.node, now());
    else input(to, hand_over);
}

bool World::may_send(Instance& who) {
    if (who.crashed) return false;
    if (who.crash_after == 0) {
        if (running_count() < 2) {
            who.crash_after = -1;  // the last one stays
            return true;
        }
        who.crashed = true;
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

void World::after_input(Instance& who) {
    if (who.crashed) {
        died(who);
        return;
    }
    if (!who.just_completed.empty()) {
        const auto done = std::move(who.just_completed);
        who.just_completed.clear();
        for (const auto& request : done) {
            OpenCall* call = who.program->find(request);
            if (call == nullptr || call->checked) continue;  // completed inside its own call: Program::add looks
            if (!request->done.load()) continue;              // an alarm: the program acknowledges and waits on
            checker_.completed(who, *call);
            who.program->completed(*call);
        }
        const Time think =
            random_.chance(0.01) ? random_.between(0, kHeartbeat / 20) : random_.between(0, scenario_.network.think);
        wake_program(who, think);
    }
    if (!violation_.found()) checker_.touched(who);
}

void World::wake_program(Instance& who, Time delay) { queue_.push(now() + delay, EventKind::Program, who.id); }

void World::died(Instance& who) {
    trace_.text(now(), "%d.%u dies", who.slot, who.incarnation);
    counters_.add(who.crash_with_host ? "inject crash with host" : "inject crash");
    who.crashed = true;
    who.just_completed.clear();
    who.node.reset();
    tell_of_exit(who, who.crash_with_host);
    deaths_.push_back({now(), who.id});
    if (calm_) queue_.push(now() + kHeartbeat * 19 / 10, EventKind::Detected, who.id);
}

// L: where nothing but crashes has happened, a silent host is out of every view within one heartbeat, however many ranks it had
// (M12), and a share of another for the wait of M11.
void World::check_detected(const Instance& dead) {
    if (!calm_) return;
    const Time since = now() - kHeartbeat * 19 / 10;
    for (const auto& [at, id] : deaths_) {
        const bool together = at == since && same_host(instance(id).slot, dead.slot);
        if (!together && at > since - 3 * kHeartbeat) return;  // each view change starts the clocks again
    }
    for (auto& i : instances_) {
        if (!i->running() || i->was_stale || i->program->joining() || i->view.empty()) continue;
        if (i->view.has(dead.slot) && i->node->incarnation_of(dead.slot) == dead.incarnation)
            violate("L", "slot %d still counts on slot %d, dead for %.3f s", i->slot, dead.slot,
                    static_cast<double>(now() - since) * 1e-9);
    }
}

void World::exited(Instance& who) {
    if (!who.running()) return;
    calm_ = false;
    trace_.text(now(), "%d.%u exits%s", who.slot, who.incarnation, who.left ? " after leave" : "");
    counters_.add(who.left ? "inject leave and exit" : "inject exit of a voted-out rank");
    who.crashed = !who.left;
    who.node.reset();
    tell_of_exit(who, false);
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
            queue_.push(now() + random_.between(kMs, 50 * kMs), EventKind::Evidence, i->id, who.id,
                        static_cast<int>(Evidence::Reset));
        }
    }
    if (scenario_.joinable[static_cast<std::size_t>(who.slot)] && !who.left && newest(who.slot) == &who)
        queue_.push(now() + random_.between(10 * kMs, 3 * kHeartbeat), EventKind::Spawn, who.slot);
}

void World::evidence(Instance& observer, Instance& about, Evidence kind) {
    if (!observer.running()) return;
    // Whoever reports an exit on its own host has read the dead rank's channel first (M10).
    if (same_host(observer.slot, about.slot) && kind != Evidence::Reset) links_.drain(about, observer, false);
    trace_.text(now(), "%d.%u is told: %d.%u %s", observer.slot, observer.incarnation, about.slot, about.incarnation,
                to_string(kind));
    input(observer, [&](Node& node, Time at) { node.on_evidence(at, about.slot, about.incarnation, kind); });
}

void World::on_event(Instance& who, const NodeEvent& e) {
    trace_.text(now(), "%d.%u event %s slot %d epoch %llu comm %llu seq %llu attempt %u %s %s", who.slot, who.incarnation,
                to_string(e.kind), e.slot, static_cast<unsigned long long>(e.epoch), static_cast<unsigned long long>(e.comm),
                static_cast<unsigned long long>(e.seq), e.attempt, e.ranks.text().c_str(), e.text.c_str());
    counters_.add((std::string("event ") + to_string(e.kind)).c_str());
    checker_.event(who, e);
    Trigger trigger = Trigger::Group;
    switch (e.kind) {
        case NodeEvent::Kind::Frozen: trigger = Trigger::Frozen; break;
        case NodeEvent::Kind::Decided: trigger = Trigger::Decided; break;
        case NodeEvent::Kind::Suspected: trigger = Trigger::Suspected; break;
        case NodeEvent::Kind::ViewChanged: trigger = Trigger::ViewChanged; break;
        case NodeEvent::Kind::JoinWaiting: trigger = Trigger::JoinWaiting; break;
        default: break;
    }
    if (e.kind == NodeEvent::Kind::Removed && e.slot >= 0 && scenario_.joinable[static_cast<std::size_t>(e.slot)]) {
        // Voted out while it only sleeps: its replacement starts all the same (M9).
        Instance* out = newest(e.slot);
        if (out->running() && out->stopped_until > now() && out->incarnation == e.incarnation && random_.chance(0.3))
            queue_.push(now() + random_.between(10 * kMs, kHeartbeat), EventKind::Spawn, e.slot);
    }
    if (trigger == Trigger::Group || safety_over_) return;
    const int nth = ++event_counts_[static_cast<std::size_t>(trigger)];
    for (auto& fault : faults_) {
        if (!fault.fired && fault.trigger == trigger && fault.nth <= nth) {
            counters_.add("inject fault during a recovery");
            fire(fault, &who);
        }
    }
}

void World::begins_group(Instance& who, int group) {
    if (safety_over_) return;
    for (auto& fault : faults_) {
        if (!fault.fired && fault.trigger == Trigger::Group && fault.slot == who.slot && fault.group <= group)
            fire(fault, nullptr);
    }
}

void World::fire(Fault& f, Instance* emitter) {
    f.fired = true;
    Instance* victim = f.at_emitter && emitter != nullptr ? emitter : newest(f.slot);
    if (victim == nullptr || !victim->running()) return;
    trace_.text(now(), "fault %s of %d.%u", to_string(f.kind), victim->slot, victim->incarnation);
    const auto host = [&](int slot) { return scenario_.hosts[static_cast<std::size_t>(slot)]; };
    const Time until = now() + f.duration;
    if (f.kind != FaultKind::Crash && f.kind != FaultKind::CrashHost) calm_ = false;
    auto kind = f.kind;
    // Ranks of one host share memory: there is no link to cut.
    if ((kind == FaultKind::CutLink || kind == FaultKind::Reset) && host(f.other) == host(victim->slot)) {
        if (scenario_.quiet) return;
        kind = FaultKind::Stop;
    }
    if (kind == FaultKind::Isolate && host(0) == host(scenario_.ranks - 1)) kind = FaultKind::Stop;
    counters_.add((std::string("inject ") + to_string(kind)).c_str());
    if (kind != FaultKind::Crash && kind != FaultKind::CrashHost) quiet_after_ = std::max(quiet_after_, until);
    switch (kind) {
        case FaultKind::Crash:
            if (victim->crash_after < 0) victim->crash_after = f.commits;
            break;
        case FaultKind::CrashHost:
            for (std::size_t i = 0; i < instances_.size(); ++i) {
                Instance& one = *instances_[i];
                if (!one.running() || host(one.slot) != host(victim->slot) || running_count() < 2) continue;
                one.crash_with_host = true;
                one.crashed = true;
                if (&one != emitter && !one.inside) died(one);
            }
            break;
        case FaultKind::Stop:
            victim->stop_after = f.commits;
            victim->stop_for = f.duration;
            break;
        case FaultKind::CutLink:
            links_.cut(victim->slot, f.other, until);
            if (f.both) links_.cut(f.other, victim->slot, until);
            break;
        case FaultKind::Isolate: {
            std::map<std::uint64_t, bool> side;
            for (auto h : scenario_.hosts) side.try_emplace(h, random_.chance(0.5));
            side[host(victim->slot)] = true;
            if (std::all_of(side.begin(), side.end(), [](const auto& s) { return s.second; })) side[host(victim->slot)] = false;
            for (int a = 0; a < scenario_.ranks; ++a)
                for (int b = 0; b < scenario_.ranks; ++b)
                    if (side[host(a)] != side[host(b)] && (f.both || side[host(a)])) links_.cut(a, b, until);
            break;
        }
        case FaultKind::Reset: {
            Instance* other = newest(f.other);
            if (other == nullptr || !other->running()) break;
            queue_.push(now(), EventKind::Evidence, victim->id, other->id, static_cast<int>(Evidence::Reset));
            if (f.both) queue_.push(now(), EventKind::Evidence, other->id, victim->id, static_cast<int>(Evidence::Reset));
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

void World::check_stall() {
    const Time bound = (scenario_.has_naps ? 40 : 25) * kHeartbeat;
    if (now() - std::max(last_progress_, quiet_after_) > bound)
        violate("L", "nothing has completed for %.0f s: %s", static_cast<double>(bound) * 1e-9, stuck().c_str());
}

int World::running_count() {
    int n = 0;
    for (auto& i : instances_)
        if (i->running() && !i->was_stale && !i->program->joining()) ++n;
    return n;
}

bool World::all_done() {
    for (auto& i : instances_)
        if (i->running() && !i->program->joining()) return false;
    return true;  // a replacement that nobody is left to admit may wait
}

std::string World::stuck() {
    std::string out;
    for (auto& i : instances_)
        if (i->running())
            out += "\n    " + std::to_string(i->slot) + "." + std::to_string(i->incarnation) + " epoch " +
                   std::to_string(i->epoch) + (i->was_stale ? " stale " : " ") + i->program->where();
    return out;
}

void World::violate(const char* invariant, const char* format, ...) {
    if (violation_.found()) return;
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    violation_ = {invariant, now(), text};
    trace_.text(now(), "VIOLATION of %s", invariant);
}

}  // namespace ftcomm::sim
