#include "sim/scale_world.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace ftcomm::sim {

namespace {
constexpr std::uint64_t kBoot = 77;
const std::string kJob = "scale";
}  // namespace

struct ScaleWorld::Rank final : NodeHost, Authority, Transport {
    Rank(ScaleWorld& w, int s) : world(w), slot(s) {}

    void event(const NodeEvent&) override {}
    void completed(const RequestPtr& request) override {
        if (world.waited_for_.erase(request.get()) > 0) {
            FT_CHECK(request->status.ok(), "rank %d: %s", slot, request->status.message.c_str());
            world.done(slot);
        } else {
            early.push_back(request);
        }
    }
    using Transport::read;
    void read(const std::string& key, std::uint64_t request) override { world.ask(slot, true, key, {}, {}, request); }
    void compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) override {
        world.ask(slot, false, key, expected, desired, request);
    }
    std::byte* reserve(int, std::uint32_t length) override {
        if (world.room_.size() < std::max<std::size_t>(length, 1)) world.room_.resize(std::max<std::size_t>(length, 1));
        return world.room_.data();
    }
    void commit(int to, const FrameHeader& header) override { world.send(slot, to, header, world.room_.data()); }
    void attach(int, std::uint32_t) override {}
    void detach(int) override {}
    std::uint32_t max_payload() const override { return kMaxFramePayload; }

    ScaleWorld& world;
    const int slot;
    Time busy = 0;             // its processor has work until then
    std::uint64_t depth = 0;   // of the longest chain of messages that has come here
    std::uint64_t sent = 0, received = 0;
    std::unordered_set<int> peers;
    std::vector<RequestPtr> early;  // done within the call that made them
    std::unique_ptr<Node> node;
};

ScaleWorld::ScaleWorld(int ranks, int per_host, const ScaleCost& cost) : per_host_(per_host), cost_(cost) {
    const auto n = static_cast<std::size_t>(ranks);
    const auto view = Node::make_initial_view(kJob, kBoot, std::vector<std::uint32_t>(n, 0));
    cells_[Node::view_key(kJob)] = view;
    NodeConfig c;
    c.job = kJob;
    c.world_size = ranks;
    c.boot = kBoot;
    c.heartbeat = kHeartbeat;
    c.initial_view = view;
    for (int r = 0; r < ranks; ++r) c.hosts.push_back(static_cast<std::uint64_t>(host_of(r)) + 1);
    CommSpec spec;
    spec.id = kWorld;
    spec.name = "world";
    for (int r = 0; r < ranks; ++r) spec.members.push_back(r);
    for (int r = 0; r < ranks; ++r) {
        ranks_.push_back(std::make_unique<Rank>(*this, r));
        auto& rank = *ranks_.back();
        c.slot = r;
        c.seed = 1000 + static_cast<std::uint64_t>(r);
        rank.node = std::make_unique<Node>(c, rank, rank, rank, now_);
        const auto made = rank.node->create_comm(now_, spec);
        FT_CHECK(made.ok(), "rank %d: %s", r, made.message.c_str());
    }
}

ScaleWorld::~ScaleWorld() = default;

bool ScaleWorld::alive(int rank) const { return ranks_[static_cast<std::size_t>(rank)]->node != nullptr; }

Node& ScaleWorld::node(int rank) { return *ranks_[static_cast<std::size_t>(rank)]->node; }

void ScaleWorld::kill(int rank) { ranks_[static_cast<std::size_t>(rank)]->node.reset(); }

void ScaleWorld::start_count() {
    FT_CHECK(queue_.empty() && waited_for_.empty(), "something is under way");
    for (auto& r : ranks_) now_ = std::max(now_, r->busy);
    now_ = std::max(now_, authority_busy_);
    for (auto& r : ranks_) {
        r->depth = r->sent = r->received = 0;
        r->peers.clear();
    }
    began_ = last_done_ = now_;
    count_ = {};
}

ScaleCount ScaleWorld::count() const {
    ScaleCount out = count_;
    out.time = last_done_ - began_;
    for (const auto& r : ranks_) {
        out.most_sent = std::max(out.most_sent, r->sent);
        out.most_received = std::max(out.most_received, r->received);
        out.most_peers = std::max<std::uint64_t>(out.most_peers, r->peers.size());
    }
    return out;
}

Time ScaleWorld::begin_input(int rank, Time delay) {
    auto& r = *ranks_[static_cast<std::size_t>(rank)];
    return r.busy = std::max(r.busy, now_ + delay);
}

void ScaleWorld::end_input(int rank) {
    auto& r = *ranks_[static_cast<std::size_t>(rank)];
    while (r.node->has_work()) r.node->work(r.busy);
}

void ScaleWorld::post(int rank, RequestPtr request) {
    auto& early = ranks_[static_cast<std::size_t>(rank)]->early;
    FT_CHECK(request->status.ok(), "rank %d: %s", rank, request->status.message.c_str());
    if (std::erase(early, request) > 0) done(rank);
    else waited_for_[request.get()] = request;
}

void ScaleWorld::done(int rank) {
    auto& r = *ranks_[static_cast<std::size_t>(rank)];
    last_done_ = std::max(last_done_, r.busy);
    count_.rounds = std::max(count_.rounds, r.depth);
}

void ScaleWorld::advance(Time by) {
    for (auto& r : ranks_) now_ = std::max(now_, r->busy);
    now_ += by;
}

// A broadcast is the same bytes again and again: they are kept once, as they are as many as ranks for each of as many.
std::shared_ptr<const Bytes> ScaleWorld::shared(const std::byte* data, std::size_t bytes) {
    if (bytes == 0) return nullptr;
    const bool same =
        last_payload_ != nullptr && last_payload_->size() == bytes && std::memcmp(last_payload_->data(), data, bytes) == 0;
    if (!same) last_payload_ = std::make_shared<const Bytes>(data, data + bytes);
    return last_payload_;
}

void ScaleWorld::send(int from, int to, const FrameHeader& header, const std::byte* data) {
    auto& r = *ranks_[static_cast<std::size_t>(from)];
    const auto bytes = sizeof header + header.length;
    r.busy += cost_.of(bytes);
    ++r.sent;
    r.peers.insert(to);
    ++count_.messages;
    count_.bytes += bytes;
    queue_.push({r.busy + cost_.latency, order_++, from, to, r.depth + 1, header, shared(data, header.length), 0});
}

void ScaleWorld::ask(int rank, bool is_read, const std::string& key, const Bytes& expected, const Bytes& desired,
                     std::uint64_t request) {
    auto& r = *ranks_[static_cast<std::size_t>(rank)];
    CellOperation op{rank, is_read, key, shared(expected.data(), expected.size()), shared(desired.data(), desired.size()), {}};
    op.reply.request = request;
    op.reply.boot = kBoot;
    operations_.push_back(std::move(op));
    r.busy += cost_.of(key.size() + expected.size() + desired.size());
    ++count_.cell_requests;
    queue_.push({r.busy + cost_.latency, order_++, rank, kAuthority, r.depth + 1, {}, nullptr, operations_.size() - 1});
}

// One after another, as a store does it.
void ScaleWorld::at_authority(const Event& event) {
    auto& op = operations_[event.cell];
    const auto bytes = [](const auto& held) { return held == nullptr ? std::size_t{0} : held->size(); };
    authority_busy_ = std::max(authority_busy_, event.at) + cost_.of(bytes(op.expected) + bytes(op.desired));
    Bytes& cell = cells_[op.key];
    if (op.is_read) {
        op.reply.result = CellResult::Value;
        op.reply.value = cell;
    } else if (op.expected == nullptr ? cell.empty() : cell == *op.expected) {
        op.reply.result = CellResult::Swapped;
        cell = op.desired == nullptr ? Bytes() : *op.desired;
    } else {
        op.reply.result = CellResult::Conflict;
        op.reply.value = cell;
    }
    op.expected = op.desired = nullptr;
    authority_busy_ += cost_.of(op.reply.value.size());
    queue_.push({authority_busy_ + cost_.latency, order_++, kAuthority, op.rank, event.depth + 1, {}, nullptr, event.cell});
}

void ScaleWorld::deliver(const Event& event) {
    auto& r = *ranks_[static_cast<std::size_t>(event.to)];
    if (r.node == nullptr) return;
    r.depth = std::max(r.depth, event.depth);
    if (event.from == kAuthority) {
        CellReply reply = std::move(operations_[event.cell].reply);
        r.busy = std::max(r.busy, event.at) + cost_.of(reply.value.size());
        r.node->on_cell(r.busy, std::move(reply));
    } else {
        ++r.received;
        r.peers.insert(event.from);
        r.busy = std::max(r.busy, event.at) + cost_.of(sizeof event.header + event.header.length);
        r.node->on_frame(r.busy, event.from, 0, event.header, event.payload == nullptr ? ByteView{} : ByteView(*event.payload));
    }
    end_input(event.to);
    if (looks_) looks_(event.to);
}

void ScaleWorld::run() {
    while (!queue_.empty()) {
        const Event event = queue_.top();
        queue_.pop();
        now_ = event.at;
        if (event.to == kAuthority) at_authority(event);
        else deliver(event);
    }
    operations_.clear();
}

}  // namespace ftcomm::sim
