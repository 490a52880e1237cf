#include "sim/world.h"

#include <algorithm>
#include <cstdarg>

#include "membership/view.h"
#include "sim/expected.h"

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
void Instance::trace(const char* transition) {
    world.counters().add(transition);
    if (!crashed) world.on_transition(*this, transition);
}

World::World(const Scenario& scenario, const std::vector<std::string>& mutations, Counters& counters, bool live_trace)
    : scenario_(scenario),
      faults_(scenario.faults),
      mutations_(mutations),
      counters_(counters),
      trace_(live_trace),
      random_(scenario.seed ^ 0x51f15eedULL),
      looks_(scenario.seed ^ 0x1003ULL),
      links_(*this, Random(scenario.seed ^ 0x11e75ULL)),
      store_(*this, Random(scenario.seed ^ 0xce11ULL)),
      checker_(*this),
      detection_(*this),
      event_counts_(32, 0) {
    initial_view_ =
        Node::make_initial_view(job(), store_.boot, std::vector<std::uint32_t>(static_cast<std::size_t>(scenario.ranks), 0), {},
                                scenario.log_groups, scenario.crowded);
    store_.create(Node::view_key(job()), initial_view_);
    agents_ = random_.chance(0.5);
    for (int slot = 0; slot < scenario.ranks; ++slot) start(slot, 0);
    queue_.push(now() + 60 * kHeartbeat, EventKind::EndSafety);
    last_progress_ = now();
}

const World::Window* World::window_at(int owner, std::uint64_t place) const {
    const auto number = static_cast<std::size_t>(place / kPlace);
    if (number == 0) return nullptr;
    FT_CHECK(number <= windows_.size() && windows_[number - 1].owner == owner && offset_of(place) < windows_[number - 1].bytes,
             "instance %d has no window at place %llu", owner, static_cast<unsigned long long>(place));
    return &windows_[number - 1];
}

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
    c.job = job();
    c.slot = slot;
    c.incarnation = incarnation;
    c.world_size = scenario_.ranks;
    c.joining = scenario_.replay
                    ? JobView::decode(initial_view_)->members[static_cast<std::size_t>(slot)].incarnation != incarnation
                    : incarnation > 0;
    c.boot = 77;
    c.seed = scenario_.seed * 1000 + static_cast<std::uint64_t>(who.id);
    c.heartbeat = kHeartbeat;
    c.timeout = 1000 * kHeartbeat;
    c.hosts = scenario_.hosts;
    c.flat_limit = scenario_.flat_limit;
    c.pull_limit = scenario_.pull_limit;
    c.piece_bytes = 16;
    c.read_bytes = scenario_.seed % 2 == 0 ? 64 : 1u << 20;  // a message in many parts, or in one
    c.stage_limit = scenario_.stages ? 0 : ~std::uint64_t{0};
    c.post_limit = scenario_.posts ? scenario_.seed % 4 == 0 ? 24 : 16384 : 0;
    c.goes_round = (scenario_.seed / 2 + static_cast<std::uint64_t>(c.slot) + c.incarnation) % 2 == 0;
    // Never, always, or now and then: what was pushed in one attempt is shown in the next.
    c.pushes = true;
    c.quick = static_cast<std::uint32_t>((scenario_.seed / 3 + static_cast<std::uint64_t>(c.slot) + c.incarnation) % 4);
    c.stage_bytes = static_cast<std::uint64_t>(scenario_.ranks) * scenario_.segment_bytes * (scenario_.seed % 3 == 0 ? 2 : 1);
    c.segment_bytes = scenario_.segment_bytes;
    c.eager_limit = scenario_.eager_limit;
    c.spread_degree = scenario_.spread_degree;
    c.flat_trees = scenario_.flat_trees;
    c.vote_trees = scenario_.vote_trees;
    c.mutations = mutations_;
    c.initial_view = initial_view_;
    if (scenario_.replay) {
        who.log = std::make_unique<SimLog>(*this, who, logs_[scenario_.hosts[static_cast<std::size_t>(slot)]]);
        c.log = who.log.get();
        c.again = incarnation > 0;
        c.log_late = scenario_.log_late;
    }
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
    for (auto& [host, files] : logs_) checker_.logs_are_as_written(files);
    if (!violation_.found()) checker_.finish();
    // What every seed promises; without a rule a run may go any way.
    if (injected_ < 2 && mutations_.empty() && !scenario_.faults.empty()) violate("FAULTS", "only %d faults happened", injected_);
    if (in_recovery_) counters_.add(kInRecovery);
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
        case EventKind::Heard: {
            Instance& other = instance(e.b);
            if (!other.running() || other.stopped_until > now() || !links_.clear(other, instance(e.a))) break;
            input(instance(e.a), [&other](Node& node, Time at) { node.on_heard(at, other.slot, other.incarnation); });
            break;
        }
        case EventKind::Killed:
            if (instance(e.a).running() && !is_last(instance(e.a))) died(instance(e.a));
            break;
        case EventKind::Generation: start_again(e.a); break;
        case EventKind::Spawn: {
            if (scenario_.replay) {
                replace(e.a, static_cast<std::uint32_t>(e.b));
                break;
            }
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
        case EventKind::Look: {
            Instance& who = instance(e.a);
            if (who.running() && who.stopped_until > now()) {
                queue_.push(who.stopped_until + looks_.between(0, 50 * kUs), e.kind, e.a);
                break;
            }
            who.look_queued = false;
            input(who, [](Node& node, Time at) { node.look(at); });
            break;
        }
        case EventKind::Work: {
            Instance& who = instance(e.a);
            if (!who.running()) break;
            if (who.stopped_until > now()) {
                queue_.push(who.stopped_until + random_.between(0, 50 * kUs), e.kind, e.a);
                break;
            }
            who.work_queued = false;
            input(who, [](Node& node, Time at) { node.work(at); });
            break;
        }
        case EventKind::Detected: detection_.check(instance(e.a)); break;
        case EventKind::HostDeath: host_death(instance(e.a), e.b); break;
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

std::byte* World::place(int from, const Instance& to, const FrameHeader& header) const {
    const Instance& sender = *instances_[static_cast<std::size_t>(from)];
    return to.node->place(sender.slot, sender.incarnation, header);
}

void World::deliver(int from, Instance& to, Frame& frame, bool nested) {
    const Instance& sender = instance(from);
    const std::uint32_t incarnation = sender.incarnation;
    if (newest(sender.slot) != &sender) counters_.add("inject frame of a replaced incarnation");
    trace_.frame(now(), "recv", sender.slot, incarnation, to.slot, to.incarnation, frame.header);
    const auto hand_over = [&](Node& node, Time at) {
        ByteView payload(frame.data.get(), frame.header.length);
        if (auto* const to_place = frame.place != nullptr ? place(from, to, frame.header) : nullptr) {
            const auto come = to_place == frame.place ? payload.size() / 2 : 0;  // else it is sent again
            counters_.add(come > 0 ? "put into its place" : "put into another place");
            std::memcpy(to_place + come, payload.data() + come, payload.size() - come);
            payload = {to_place, payload.size()};
        } else if (frame.place != nullptr) {
            counters_.add("its place is gone");
        }
        node.on_frame(at, sender.slot, incarnation, frame.header, payload);
    };
    if (nested) hand_over(*to.node, now());
    else input(to, hand_over);
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
            if (!request->done.load()) {                      // an alarm: the program acknowledges and waits on
                checker_.no_leave_is_a_failure(who, *call, request->alarm);
                continue;
            }
            checker_.completed(who, *call);
            who.program->completed(*call);
        }
        const Time think =
            random_.chance(0.01) ? random_.between(0, kHeartbeat / 20) : random_.between(0, scenario_.network.think);
        wake_program(who, think);
    }
    const bool work = who.running() && who.node->has_work();
    if ((work || (who.running() && who.node->has_idle_work())) && !who.work_queued) {
        who.work_queued = true;
        queue_.push(now() + random_.between(0, work ? 20 * kUs : 5 * kMs), EventKind::Work, who.id);
    }
    shows(who);
    if (!violation_.found()) checker_.touched(who);
}

// Who is awake finds what this rank may have put where it watches for something.
void World::shows(Instance& who) {
    for (auto& i : instances_)
        if (i.get() != &who && i->running() && same_host(i->slot, who.slot) && i->transport.has_news()) look_soon(*i);
}

void World::look_soon(Instance& who) {
    if (std::exchange(who.look_queued, true)) return;
    queue_.push(now() + looks_.between(0, looks_.chance(0.1) ? 5 * kMs : 20 * kUs), EventKind::Look, who.id);
}

void World::wake_program(Instance& who, Time delay) { queue_.push(now() + delay, EventKind::Program, who.id); }

void World::check_stall() {
    const Time bound = (scenario_.has_naps ? 40 : 25) * kHeartbeat;
    if (now() - std::max(last_progress_, quiet_after_) > bound)
        violate("L", "nothing has completed for %.0f s: %s", static_cast<double>(bound) * 1e-9, stuck().c_str());
}

int World::running_count() {
    int n = 0;
    for (auto& i : instances_)
        if (i->running() && !i->was_stale && !i->program->joining() && (!scenario_.replay || is_member(*i))) ++n;
    return n;
}

bool World::all_done() {
    if (scenario_.replay) {
        for (int slot = 0; slot < scenario_.ranks; ++slot)
            if (!newest(slot)->left) return false;
        return true;
    }
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
