#include "sim/scale.h"

#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>

#include "base/check.h"
#include "base/json.h"
#include "base/rank_set.h"

namespace ftcomm::sim {

namespace {

// Where each rank of a world hears of a silent one by itself, each tells all: so many messages, each with a whole view, are too many.
constexpr int kMostForAllToAll = 1024;

std::int64_t resident_bytes() {
    long pages = 0, resident = 0;
    if (FILE* file = std::fopen("/proc/self/statm", "r"); file != nullptr) {
        if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
        std::fclose(file);
    }
    return static_cast<std::int64_t>(resident) * sysconf(_SC_PAGESIZE);
}

std::string json_of(const ScaleCount& c) {
    JsonObject o;
    o.add("messages", c.messages).add("bytes", c.bytes).add("most_sent", c.most_sent);
    o.add("most_received", c.most_received)
        .add("most_peers", c.most_peers)
        .add("cell_requests", c.cell_requests)
        .add("rounds", c.rounds);
    o.add("seconds", static_cast<double>(c.time) * 1e-9);
    return o.text();
}

class Phases {
public:
    Phases(const ScalePlan& plan, JsonObject* operations)
        : plan_(plan), world_(plan.ranks, plan.per_host, plan.cost), operations_(*operations) {}

    void run() {
        barrier(ScaleWorld::kWorld, "barrier");
        all_reduce();
        agree();
        death(plan_.ranks / 2);
        shrink();
        if (plan_.ranks <= kMostForAllToAll && plan_.ranks > 2 * plan_.per_host) silence(plan_.per_host);
    }

private:
    void barrier(CommId comm, const char* name) {
        collective(comm, name, [](Node& node, Time at, CommId id, std::int64_t&) { return node.collective(at, id, OpDesc{}); });
    }

    void all_reduce() {
        auto sums = collective(ScaleWorld::kWorld, "all_reduce_8_bytes", [](Node& node, Time at, CommId id, std::int64_t& value) {
            OpDesc d;
            d.kind = OpKind::AllReduce;
            d.dtype = DType::Int64;
            d.count = 1;
            d.recv = &value;
            return node.collective(at, id, d);
        });
        const auto n = static_cast<std::int64_t>(plan_.ranks);
        for (auto v : sums) FT_CHECK(v == n * (n + 1) / 2, "a sum of %lld", static_cast<long long>(v));
    }

    void agree() {
        std::vector<RequestPtr> requests;
        collective(ScaleWorld::kWorld, "agree", [&](Node& node, Time at, CommId id, std::int64_t& value) {
            requests.push_back(node.agree(at, id, ~(std::int64_t{1} << (value % 62))));
            return requests.back();
        });
        std::int64_t expected = -1;
        for (int r = 0; r < plan_.ranks; ++r) expected &= ~(std::int64_t{1} << ((r + 1) % 62));
        for (const auto& r : requests) FT_CHECK(r->value == expected, "agree gave another value");
    }

    // A process ends; its fellows of the host see it after 50 us, and by them all others know. What follows is the decision about the
    // communicators that it was in.
    void death(int victim) {
        begin();
        world_.kill(victim);
        std::vector<bool> knows(static_cast<std::size_t>(plan_.ranks));
        watch(victim, &knows);
        for (int r = 0; r < plan_.ranks; ++r)
            if (world_.alive(r) && world_.host_of(r) == world_.host_of(victim))
                world_.call(r, [&](Node& node, Time at) { return node.on_evidence(at, victim, 0, Evidence::Pidfd), 0; }, 50'000);
        world_.run();
        end("death_seen_by_host");
        check_all_know(knows);
    }

    // A rank falls silent, and nobody is left on its host to say why: the heartbeat of each other rank runs out by itself.
    void silence(int victim) {
        for (int r = 0; r < plan_.ranks; ++r)
            if (world_.alive(r)) tick(r);  // the first after a long time: it was this rank that did not run (M11)
        world_.run();
        begin();
        for (int r = victim; r < plan_.ranks && world_.host_of(r) == world_.host_of(victim); ++r) world_.kill(r);
        std::vector<bool> knows(static_cast<std::size_t>(plan_.ranks));
        watch(victim, &knows);
        for (int ticks = 1; ticks <= 24; ++ticks) {
            world_.advance(ScaleWorld::kHeartbeat / 20);
            for (int r = 0; r < plan_.ranks; ++r) {
                if (!world_.alive(r)) continue;
                if (ticks % 4 == 0)
                    for (int o = 0; o < plan_.ranks; ++o)
                        if (o != r && world_.alive(o))
                            world_.call(r, [&](Node& node, Time at) { return node.on_heard(at, o, 0), 0; });
                tick(r);
            }
            world_.run();
        }
        end("silent_host");
        check_all_know(knows);
    }

    void shrink() {
        std::vector<RequestPtr> requests;
        collective(ScaleWorld::kWorld, "shrink", [&](Node& node, Time at, CommId id, std::int64_t&) {
            requests.push_back(node.shrink(at, id));
            return requests.back();
        });
        CommSpec spec;
        spec.id = requests.front()->new_comm;
        spec.name = "world.shrunk";
        spec.members = requests.front()->survivors.list();
        for (const auto& r : requests)
            FT_CHECK(r->new_comm == spec.id && r->survivors == requests.front()->survivors, "two outcomes of shrink");
        FT_CHECK(static_cast<int>(spec.members.size()) == living(), "shrink has %zu of %d", spec.members.size(), living());
        for (int r : spec.members)
            world_.call(r, [&](Node& node, Time at) {
                FT_CHECK(node.create_comm(at, spec).ok(), "rank %d cannot make the communicator", r);
                return 0;
            });
        barrier(spec.id, "barrier_after_shrink");
    }

    template <class Call>
    std::vector<std::int64_t> collective(CommId comm, const char* name, Call call) {
        std::vector<std::int64_t> values(static_cast<std::size_t>(plan_.ranks));
        begin();
        for (int r = 0; r < plan_.ranks; ++r) {
            if (!world_.alive(r)) continue;
            auto& value = values[static_cast<std::size_t>(r)];
            value = r + 1;
            world_.post(r, world_.call(r, [&](Node& node, Time at) { return call(node, at, comm, value); }));
        }
        world_.run();
        FT_CHECK(world_.undone() == 0, "%s: %zu ranks are not through", name, world_.undone());
        end(name);
        return values;
    }

    void tick(int rank) {
        world_.call(rank, [](Node& node, Time at) { return node.on_tick(at), 0; });
    }
    void watch(int victim, std::vector<bool>* knows) {
        world_.look_after_each([this, victim, knows](int rank) {
            auto known = (*knows)[static_cast<std::size_t>(rank)];
            if (known) return;
            world_.call(
                rank, [&](Node& node, Time) { return known = RankSet::of(node.comm_failed(ScaleWorld::kWorld)).has(victim), 0; });
            if (known) world_.done(rank);
        });
    }
    void check_all_know(const std::vector<bool>& knows) {
        world_.look_after_each({});
        for (int r = 0; r < plan_.ranks; ++r)
            FT_CHECK(!world_.alive(r) || knows[static_cast<std::size_t>(r)], "rank %d does not know of the death", r);
    }
    int living() const {
        int n = 0;
        for (int r = 0; r < plan_.ranks; ++r) n += world_.alive(r);
        return n;
    }
    void begin() {
        world_.start_count();
        began_ = std::chrono::steady_clock::now();
    }
    void end(const char* name) {
        operations_.raw(name, json_of(world_.count()));
        const auto took = std::chrono::steady_clock::now() - began_;
        std::fprintf(stderr, "%d ranks, %s: %.1f s\n", plan_.ranks, name, std::chrono::duration<double>(took).count());
    }

    const ScalePlan plan_;
    ScaleWorld world_;
    JsonObject& operations_;
    std::chrono::steady_clock::time_point began_;
};

}  // namespace

int run_scale(const ScalePlan& plan) {
    JsonObject out, operations;
    out.add("ranks", plan.ranks).add("ranks_per_host", plan.per_host);
    out.add("link_us", static_cast<double>(plan.cost.latency) * 1e-3);
    out.add("message_ns", plan.cost.overhead).add("byte_ns", plan.cost.per_byte).add("most_ranks", kMaxRanks);
    operations.raw("fence", json_of(run_fence(plan.ranks, plan.cost)));
    const bool whole = !plan.fence_only && plan.ranks <= kMaxRanks;
    out.add("whole_nodes", whole);
    if (whole) {
        const auto before = resident_bytes();
        Phases phases(plan, &operations);
        out.add("bytes_per_rank", (resident_bytes() - before) / plan.ranks);
        phases.run();
    }
    out.raw("operations", operations.text());
    std::printf("%s\n", out.text().c_str());
    return 0;
}

}  // namespace ftcomm::sim
