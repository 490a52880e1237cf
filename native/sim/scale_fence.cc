// The dissemination fence by itself. Of what a rank has in life it has no list of the living, and no queue for each peer: all fences
// share one environment, in which this rank's position is set before each input.
#include <algorithm>
#include <queue>
#include <unordered_set>

#include "base/check.h"
#include "collectives/run.h"
#include "sim/scale.h"

namespace ftcomm::sim {

namespace {

struct Arrival {
    Time at;
    std::uint64_t order;
    int to;
    std::uint16_t step;
    std::uint32_t depth;
    bool operator>(const Arrival& other) const { return at != other.at ? at > other.at : order > other.order; }
};

struct Each {
    Time busy = 0;
    std::uint32_t depth = 0, sent = 0, received = 0;
    std::unordered_set<int> peers;
    bool done = false;
};

class FenceWorld final : public Transport {
public:
    FenceWorld(int ranks, const ScaleCost& cost) : cost_(cost), each_(static_cast<std::size_t>(ranks)) {}

    std::byte* reserve(int, std::uint32_t) override { return &nothing_; }
    void commit(int to, const FrameHeader& header) override {
        auto& e = each(here);
        e.busy += cost_.of(sizeof header);
        ++e.sent;
        e.peers.insert(to);
        each(to).peers.insert(here);
        ++count.messages;
        count.bytes += sizeof header;
        queue.push({e.busy + cost_.latency, count.messages, to, header.step, e.depth + 1});
    }
    void attach(int, std::uint32_t) override {}
    void detach(int) override {}
    std::uint32_t max_payload() const override { return kMaxFramePayload; }

    Each& each(int rank) { return each_[static_cast<std::size_t>(rank)]; }
    const std::vector<Each>& all() const { return each_; }
    // The rank whose turn it is, with what a frame costs it.
    Each& arrived(const Arrival& a) {
        auto& e = each(a.to);
        e.busy = std::max(e.busy, a.at) + cost_.of(sizeof(FrameHeader));
        e.depth = std::max(e.depth, a.depth);
        ++e.received;
        return e;
    }

    int here = 0;
    std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> queue;
    ScaleCount count;

private:
    const ScaleCost cost_;
    std::vector<Each> each_;
    std::byte nothing_{};
};

}  // namespace

ScaleCount run_fence(int ranks, const ScaleCost& cost) {
    FenceWorld world(ranks, cost);
    Sender sender(world);
    std::vector<int> everybody(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) everybody[static_cast<std::size_t>(r)] = r;
    RunEnv env{sender, everybody, ScaleWorld::kWorld, 0, 0, everybody, 0};
    const OpState op(1, OpDesc{}, Shape{}, Grid::make(1, 0, 1), 0, true, nullptr);
    std::vector<Fence> fences(static_cast<std::size_t>(ranks), Fence(env, op));

    ScaleCount out;
    const auto look = [&](int rank) {
        auto& e = world.each(rank);
        if (e.done || !fences[static_cast<std::size_t>(rank)].done()) return;
        e.done = true;
        out.time = std::max(out.time, e.busy);
        out.rounds = std::max<std::uint64_t>(out.rounds, e.depth);
    };
    const auto turn = [&](int rank) -> Fence& {
        env.rank = env.position = world.here = rank;
        return fences[static_cast<std::size_t>(rank)];
    };
    for (int r = 0; r < ranks; ++r) {
        turn(r).begin();
        look(r);
    }
    while (!world.queue.empty()) {
        const Arrival a = world.queue.top();
        world.queue.pop();
        world.arrived(a);
        FrameHeader h;
        h.step = a.step;
        turn(a.to).on_frame(h);
        look(a.to);
    }
    out.messages = world.count.messages;
    out.bytes = world.count.bytes;
    for (const auto& e : world.all()) {
        FT_CHECK(e.done, "a rank did not come through the fence");
        out.most_sent = std::max<std::uint64_t>(out.most_sent, e.sent);
        out.most_received = std::max<std::uint64_t>(out.most_received, e.received);
        out.most_peers = std::max<std::uint64_t>(out.most_peers, e.peers.size());
    }
    return out;
}

}  // namespace ftcomm::sim
