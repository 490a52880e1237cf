#include "tests/node_rig.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "sim/left_windows.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {
constexpr std::uint64_t kBoot = 77;
const std::string kJob = "rig";
}  // namespace

struct Rig::Peer final : NodeHost, Authority, Transport {
    Peer(Rig& r, int s, std::uint32_t i) : rig(r), slot(s), incarnation(i), targets(r.peers_.size(), 0) {}

    void event(const NodeEvent& e) override { events.push_back(e); }
    void completed(const RequestPtr&) override {}
    void trace(const char* transition) override { transitions.insert(transition); }

    void read(const std::string& key, std::uint64_t request) override { asked.push_back({key, false, {}, {}, request}); }
    void compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) override {
        asked.push_back({key, true, expected, desired, request});
    }

    std::byte* reserve(int to, std::uint32_t length) override {
        if (detached.count(to) > 0) failed(__FILE__, __LINE__, "a frame for a slot that is nobody now");
        if (rig.link(slot, to).room == 0) return nullptr;
        room.resize(std::max<std::size_t>(length, 1));
        return room.data();
    }
    void commit(int to, const FrameHeader& h) override {
        if (rig.link(slot, to).room > 0) --rig.link(slot, to).room;
        rig.link(slot, to).frames.push_back({incarnation, targets[static_cast<std::size_t>(to)], h,
                                             Bytes(room.begin(), room.begin() + static_cast<std::ptrdiff_t>(h.length))});
    }
    void attach(int to, std::uint32_t i) override {
        targets[static_cast<std::size_t>(to)] = i;
        detached.erase(to);
    }
    void detach(int to) override {
        detached.insert(to);
        const auto incarnation = targets[static_cast<std::size_t>(to)];
        if (rig.peer(to).node != nullptr && rig.peer(to).incarnation == incarnation) return;
        for (auto& window : rig.windows_)  // ShmTransport::discard_windows
            if (window.slot == to && window.incarnation == incarnation) std::fill_n(window.memory.begin(), 8, std::byte{0});
    }
    void drain(int from) override {
        if (node != nullptr && !rig.link(from, slot).held) rig.deliver_all(from, slot);
    }
    std::uint32_t max_payload() const override { return rig.setup_.max_payload; }
    bool shares_memory(int) override { return rig.setup_.reads; }
    bool is_near(int) override { return rig.setup_.reads || rig.setup_.near || rig.setup_.stream_limit != kNeverStreams; }
    Read read(int from, const Remote& remote, std::byte* to, std::size_t bytes) override {
        if (rig.peer(from).node == nullptr || !remote.is_of(targets[static_cast<std::size_t>(from)])) return Read::Over;
        if (rig.broken_reads_.contains(from)) {
            std::memset(to, 0x5a, bytes / 2);
            return Read::Over;
        }
        std::memcpy(to, reinterpret_cast<const void*>(remote.from), bytes);  // NOLINT: of another process
        if (remote.ticket_at == 0) return Read::Refused;
        return *reinterpret_cast<const std::uint64_t*>(remote.ticket_at) == remote.ticket ? Read::Done : Read::Over;  // NOLINT
    }

    Window make_window(std::size_t bytes, Room room) override {
        if (rig.setup_.full.contains(slot) || (room == Room::Any && rig.setup_.windowless.contains(slot))) return {};
        auto& memory = rig.windows_.emplace_back(Shown{slot, incarnation, Bytes(bytes)}).memory;
        return {memory.data(), reinterpret_cast<std::uintptr_t>(memory.data())};
    }
    const std::byte* look(int to, std::uint64_t place, std::size_t bytes) override {
        (void)bytes;
        return detached.count(to) > 0 ? nullptr : reinterpret_cast<const std::byte*>(place);  // NOLINT: of the host
    }
    void watch_words(std::span<const Word> all) override { words.assign(all.begin(), all.end()); }
    void nudge(int to) override { rig.peer(to).nudged = true; }

    Rig& rig;
    const int slot;
    const std::uint32_t incarnation;
    std::vector<std::uint32_t> targets;
    std::set<int> detached;
    Bytes room;
    std::deque<Asked> asked;
    std::deque<CellReply> answers;
    bool cells_held = false;
    std::vector<Word> words;
    bool nudged = false, asleep = false;
    std::vector<NodeEvent> events;
    std::set<std::string> transitions;
    RequestPtr join;
    std::unique_ptr<MemoryLog> log;
    std::unique_ptr<Node> node;
};

Rig::Rig(int slots, Setup setup) : setup_(setup) {
    peers_.resize(static_cast<std::size_t>(slots));
    cells_[Node::view_key(kJob)] = Node::make_initial_view(
        kJob, kBoot, std::vector<std::uint32_t>(static_cast<std::size_t>(slots), 0), {}, setup.groups, setup.crowded);
    for (int s = 0; s < slots; ++s) start(s, 0);
}
Rig::~Rig() = default;

void Rig::start(int slot, std::uint32_t incarnation) {
    auto fresh = std::make_unique<Peer>(*this, slot, incarnation);
    NodeConfig c;
    c.job = kJob;
    c.slot = slot;
    c.incarnation = incarnation;
    c.world_size = static_cast<int>(peers_.size());
    c.joining = incarnation > 0;
    c.boot = kBoot;
    c.seed = 1000 + static_cast<std::uint64_t>(slot) * 10 + incarnation;
    c.heartbeat = kHeartbeat;
    c.timeout = setup_.timeout;
    c.eager_limit = setup_.eager_limit;
    c.spread_degree = setup_.spread_degree;
    c.stream_limit = setup_.stream_limit;
    c.pushes = c.goes_round = setup_.pushes && (slot == 0 || !setup_.only_first_pushes);
    c.quick = c.pushes ? 1 : 0;
    c.stage_limit = setup_.stage_limit;
    c.stage_bytes = setup_.stage_bytes;
    c.post_limit = setup_.post_limit;
    if (setup_.reads || setup_.near) c.pull_limit = setup_.pull_limit;
    if (setup_.reads) {
        c.piece_bytes = 16;
        c.read_bytes = 64;
    }
    for (std::size_t i = 0; i < peers_.size(); ++i) c.hosts.push_back(setup_.one_host ? 1 : i + 1);
    c.initial_view = Node::make_initial_view(kJob, kBoot, std::vector<std::uint32_t>(peers_.size(), 0), {}, setup_.groups,
                                             setup_.crowded);  // what formation wrote
    auto& p = *fresh;
    if (setup_.replay) {
        p.log =
            std::make_unique<MemoryLog>(log(slot), slot, [this, slot](int other) { return setup_.one_host || other == slot; });
        p.log->recover();
        c.log = p.log.get();
        c.again = incarnation > 0;
        c.log_late = setup_.log_late;
    }
    peers_[static_cast<std::size_t>(slot)] = std::move(fresh);
    p.node = std::make_unique<Node>(c, p, p, p, now_);
}

Node& Rig::node(int slot) {
    FT_CHECK(peer(slot).node != nullptr, "slot %d is dead", slot);
    return *peer(slot).node;
}

void Rig::join_comm(int slot, const std::vector<int>& slots, CommId id, Policy policy) {
    CommSpec spec;
    spec.id = id;
    spec.name = "rig";
    spec.members = slots;
    spec.policy = policy;
    const auto status = node(slot).create_comm(now_, spec);
    FT_CHECK(status.ok(), "create_comm: %s", status.message.c_str());
}

void Rig::ask_again(int slot, int observer) {
    kill(slot);
    evidence(observer, slot, Evidence::Pidfd);
    settle();
    restart(slot);
    settle();
}

void Rig::replace(int slot, int observer, const std::vector<int>& slots) {
    ask_again(slot, observer);
    join_comm(slot, slots, kComm, Policy::Replay);
}

void Rig::comm(const std::vector<int>& slots, CommId id, Policy policy) {
    for (int s : slots) join_comm(s, slots, id, policy);
}

bool Rig::deliver(int from, int to) {
    auto& l = link(from, to);
    if (l.frames.empty()) return false;
    const Frame f = std::move(l.frames.front());
    l.frames.pop_front();
    auto& p = peer(to);
    if (p.node != nullptr && p.incarnation == f.to_incarnation)
        p.node->on_frame(now_, from, f.from_incarnation, f.header, f.payload);
    return true;
}

void Rig::deliver_all(int from, int to) {
    while (deliver(from, to)) {}
}

std::size_t Rig::in_flight(int from, int to) const {
    const auto it = links_.find({from, to});
    return it == links_.end() ? 0 : it->second.frames.size();
}

bool Rig::carries(int from, int to, FrameKind kind) const {
    const auto it = links_.find({from, to});
    return it != links_.end() &&
           std::any_of(it->second.frames.begin(), it->second.frames.end(), [&](const Frame& f) { return f.header.kind == kind; });
}

Bytes Rig::last_sent(int from, int to, FrameKind kind) const {
    Bytes out;
    if (const auto it = links_.find({from, to}); it != links_.end())
        for (const auto& f : it->second.frames)
            if (f.header.kind == kind) out = f.payload;
    return out;
}

void Rig::hold(int from, int to, bool on) { link(from, to).held = on; }
void Rig::fill(int from, int to, int room) { link(from, to).room = room; }
void Rig::empty(int from, int to) {
    link(from, to).room = -1;
    node(from).on_writable(now_, to);
}

bool Rig::reach(int slot, std::size_t nth) {
    auto& p = peer(slot);
    if (p.asked.size() <= nth) return false;
    const auto at = p.asked.begin() + static_cast<std::ptrdiff_t>(nth);
    const Asked a = std::move(*at);
    p.asked.erase(at);
    auto& cell = cells_[a.key];
    CellReply reply{a.request, CellResult::Value, {}, kBoot};
    if (a.swap) {
        reply.result = cell == a.expected ? CellResult::Swapped : CellResult::Conflict;
        if (reply.result == CellResult::Swapped) cell = a.desired;
    }
    reply.value = cell;
    p.answers.push_back(std::move(reply));
    return true;
}

bool Rig::answer(int slot) {
    auto& p = peer(slot);
    if (p.answers.empty()) return false;
    const CellReply reply = std::move(p.answers.front());
    p.answers.pop_front();
    if (p.node != nullptr) p.node->on_cell(now_, reply);
    return true;
}

std::size_t Rig::asked(int slot) { return peer(slot).asked.size(); }
void Rig::hold_cells(int slot, bool on) { peer(slot).cells_held = on; }

void Rig::tick(int slot) { node(slot).on_tick(now_); }

void Rig::advance(Time by, const std::vector<int>& silent) {
    const auto is_silent = [&](int s) { return std::find(silent.begin(), silent.end(), s) != silent.end(); };
    const Time step = kHeartbeat / 20;
    for (Time t = 0; t < by; t += step) {
        now_ += step;
        for (auto& p : peers_) {
            if (p->node == nullptr) continue;
            p->node->on_tick(now_);
            for (auto& other : peers_)
                if (other != p && other->node != nullptr && !is_silent(p->slot) && !is_silent(other->slot))
                    p->node->on_heard(now_, other->slot, other->incarnation);
        }
    }
}

void Rig::kill(int slot) {
    std::vector<std::byte*> shown;
    for (auto& window : windows_)
        if (window.slot == slot && window.incarnation == peer(slot).incarnation) shown.push_back(window.memory.data());
    end_as_if_killed(shown, [&] { peer(slot).node.reset(); });
}

void Rig::evidence(int observer, int about, Evidence what, int incarnation) {
    const auto which = incarnation < 0 ? peer(about).incarnation : static_cast<std::uint32_t>(incarnation);
    node(observer).on_evidence(now_, about, which, what);
}

void Rig::restart(int slot) {
    const auto incarnation = peer(slot).incarnation + 1;
    dead_.push_back(std::move(peers_[static_cast<std::size_t>(slot)]));
    start(slot, incarnation);
    peer(slot).join = node(slot).join_wait(now_);
}

void Rig::settle() {
    int rounds = 0;
    for (bool moved = true; moved;) {
        if (++rounds > 10'000) {
            failed(__FILE__, __LINE__, "the ranks go on for ever");
            throw Abandon();
        }
        moved = false;
        for (auto& p : peers_) {
            if (p->cells_held) continue;
            if (reach(p->slot) || answer(p->slot)) moved = true;
        }
        for (auto& [ends, l] : links_)
            if (!l.held) moved |= deliver(ends.first, ends.second);
        for (auto& p : peers_) {
            if (p->node == nullptr || !(p->nudged || (!p->asleep && has_news(p->slot)))) continue;
            p->nudged = false;
            look(p->slot);
            moved = true;
        }
    }
}

bool Rig::has_news(int slot) { return std::ranges::any_of(peer(slot).words, &Transport::Word::has_changed); }
void Rig::sleep(int slot, bool on) { peer(slot).asleep = on; }
void Rig::lose_nudge(int slot) { peer(slot).nudged = false; }
bool Rig::nudged(int slot) { return peer(slot).nudged; }

bool Rig::work(int slot) {
    if (!node(slot).has_work()) return false;
    node(slot).work(now_);
    return true;
}

void Rig::go_on(const std::vector<int>& slots) {
    for (bool more = true; more;) {
        settle();
        more = false;
        for (int s : slots) more |= work(s);
    }
}

RequestPtr Rig::mark(int slot, const std::string& tag, bool commits) {
    return commits ? node(slot).comm_commit(now_, kComm, tag) : node(slot).comm_resume(now_, kComm, tag);
}

std::vector<RequestPtr> Rig::mark_all(const std::string& tag, bool commits) {
    std::vector<RequestPtr> all;
    for (int slot = 0; slot < static_cast<int>(peers_.size()); ++slot) all.push_back(mark(slot, tag, commits));
    settle();
    for (const auto& one : all) REQUIRE(one->done);
    return all;
}

std::vector<Code> codes(const std::vector<RequestPtr>& requests) {
    std::vector<Code> out;
    for (const auto& one : requests) out.push_back(one->status.code);
    return out;
}

RequestPtr Rig::sum(int slot, std::int64_t& value, CommId id) {
    OpDesc d;
    d.kind = OpKind::AllReduce;
    d.dtype = DType::Int64;
    d.op = ReduceOp::Sum;
    d.count = 1;
    d.recv = &value;
    return node(slot).collective(now_, id, d);
}

bool Rig::traced(int slot, const std::string& transition) { return peer(slot).transitions.count(transition) > 0; }

std::size_t Rig::decisions(int slot) {
    const auto& events = peer(slot).events;
    return static_cast<std::size_t>(
        std::count_if(events.begin(), events.end(), [](const NodeEvent& e) { return e.kind == NodeEvent::Kind::Decided; }));
}

std::uint32_t Rig::last_decided(int slot) {
    std::uint32_t attempt = 0;
    for (const auto& e : peer(slot).events)
        if (e.kind == NodeEvent::Kind::Decided) attempt = e.attempt;
    return attempt;
}

bool Rig::removed(int by, int slot, Evidence why) {
    const auto& events = peer(by).events;
    return std::any_of(events.begin(), events.end(), [&](const NodeEvent& e) {
        return e.kind == NodeEvent::Kind::Removed && e.slot == slot && e.evidence == why;
    });
}

}  // namespace ftcomm::unit
