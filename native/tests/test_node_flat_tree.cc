// Small operations of many ranks go along a tree. (Deaths at any message: the simulator.)
#include <functional>

#include "tests/many_ranks.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

constexpr int kRanks = ManyRanks::kRanks;

struct Many : ManyRanks {
    std::vector<std::vector<double>> in, out;
    std::vector<RequestPtr> requests;

    Many() { rig.comm(all); }
    RequestPtr post(int slot, OpDesc d) {
        d.dtype = DType::Float64;
        d.send = in[static_cast<std::size_t>(slot)].data();
        d.recv = out[static_cast<std::size_t>(slot)].data();
        return rig.node(slot).collective(rig.now(), Rig::kComm, d);
    }
    // Each rank's input is `count` of 0.1 * (rank + 1); the order in which such are added shows in the last bits.
    void run(OpKind kind, std::size_t count, std::size_t results, const std::function<void(OpDesc&)>& more = [](OpDesc&) {}) {
        in.assign(kRanks, {});
        out.assign(kRanks, std::vector<double>(results, -1));
        requests.clear();
        for (int s : all) {
            in[static_cast<std::size_t>(s)].assign(count, 0.1 * (s + 1));
            if (kind == OpKind::AllReduce) out[static_cast<std::size_t>(s)] = in[static_cast<std::size_t>(s)];  // in place
            OpDesc d;
            d.kind = kind;
            d.count = kind == OpKind::ReduceScatter ? count / kRanks : count;
            more(d);
            requests.push_back(post(s, d));
        }
        rig.settle();
        for (int s : all)
            EXPECT(requests[static_cast<std::size_t>(s)]->done && requests[static_cast<std::size_t>(s)]->status.ok());
        EXPECT(rig.traced(kRanks - 1, "run.tree"));
    }
};

// All call a sum of 1 to 9.
struct Sums : Many {
    std::vector<std::int64_t> value = std::vector<std::int64_t>(kRanks);

    void start() {
        std::iota(value.begin(), value.end(), 1);
        for (int s : all) requests.push_back(rig.sum(s, value[static_cast<std::size_t>(s)]));
        rig.settle();
    }
};

// In the tree's order: own, then the parts below.
double sum() {
    const auto x = [](int rank) { return 0.1 * (rank + 1); };
    const double left = x(1) + x(2) + (x(3) + x(4)), right = x(5) + x(6) + (x(7) + x(8));
    return x(0) + left + right;
}

}  // namespace

FT_TEST(sum_along_a_tree_has_the_same_bits_everywhere) {
    Many many;
    many.run(OpKind::AllReduce, 3, 3);
    for (const auto& got : many.out) EXPECT(got == std::vector<double>(3, sum()));
    many.run(OpKind::AllReduce, 3, 3, [](OpDesc& d) { d.op = ReduceOp::Avg; });
    for (const auto& got : many.out) EXPECT(got == std::vector<double>(3, sum() / kRanks));
    many.run(OpKind::AllReduce, 1, 1, [](OpDesc& d) {
        d.op = ReduceOp::PremulSum;
        d.factor = 2;
    });
    for (const auto& got : many.out) EXPECT(got == std::vector<double>(1, 2 * sum()));
    many.run(OpKind::AllReduce, 0, 0);
}

FT_TEST(parts_of_a_sum_along_a_tree) {
    Many many;
    many.run(OpKind::ReduceScatter, kRanks, 1);
    for (const auto& got : many.out) EXPECT(got == std::vector<double>(1, sum()));
    many.run(OpKind::Reduce, 2, 2, [](OpDesc& d) { d.root = 7; });
    for (int s : many.all) EXPECT(many.out[static_cast<std::size_t>(s)] == std::vector<double>(2, s == 7 ? sum() : -1));
}

FT_TEST(gathers_and_broadcasts_along_a_tree) {
    Many many;
    for (int root : many.all) {
        // In place: the root's data is where the others' is to be.
        many.in.assign(kRanks, {});
        many.out.assign(kRanks, {-1, -1});
        many.out[static_cast<std::size_t>(root)] = {root + 0.5, 2};
        std::vector<RequestPtr> requests;
        for (int s : many.all) {
            OpDesc d;
            d.kind = OpKind::Broadcast;
            d.count = 2;
            d.root = root;
            requests.push_back(many.post(s, d));
        }
        many.rig.settle();
        for (int s : many.all) EXPECT(many.out[static_cast<std::size_t>(s)] == (std::vector<double>{root + 0.5, 2}));
        for (const auto& r : requests) EXPECT(r->done && r->status.ok());
    }
    many.run(OpKind::AllGather, 2, 2 * kRanks);
    for (const auto& got : many.out)
        for (int r : many.all)
            for (std::size_t i : {0u, 1u}) EXPECT_EQ(got[static_cast<std::size_t>(r) * 2 + i], 0.1 * (r + 1));
    many.run(OpKind::Barrier, 0, 0);
}

// The first rank and one below it have the result, and that one's fellow has not when the first one dies: it is handed out, as all sent theirs.
FT_TEST(result_that_was_on_its_way_down_is_handed_out) {
    Sums sums;
    sums.rig.hold(0, 5);
    sums.start();
    EXPECT(sums.requests[4]->done && !sums.requests[8]->done);
    sums.die(0);
    for (std::size_t s = 1; s < kRanks; ++s) EXPECT(sums.requests[s]->done && sums.value[s] == 45);
}

// One in the middle dies with what was on its way up through it: the others' inputs are as they were.
FT_TEST(inputs_below_a_death_are_added_again) {
    Sums sums;
    sums.rig.hold(1, 0);
    sums.start();
    for (const auto& r : sums.requests) EXPECT(!r->done);
    sums.die(1);
    sums.let_go(1, 0);
    for (std::size_t s = 0; s < kRanks; ++s) {
        if (s == 1) continue;
        EXPECT(sums.requests[s]->done);
        EXPECT(!sums.requests[s]->outcome.contributors.has(1));
        EXPECT_EQ(sums.value[s], 43);
    }
}

// A block or a root's data is final where it has come, on its way up, too: it outlives who it is from.
FT_TEST(block_on_its_way_up_outlives_its_rank) {
    for (auto kind : {OpKind::AllGather, OpKind::Broadcast}) {
        Many many;
        auto& rig = many.rig;
        rig.hold(1, 0);
        many.in.assign(kRanks, {0});
        many.out.assign(kRanks, std::vector<double>(kind == OpKind::AllGather ? kRanks : 1, -1));
        many.out[4][0] = 0.5;
        std::vector<RequestPtr> requests;
        for (int s : many.all) {
            many.in[static_cast<std::size_t>(s)][0] = 0.1 * (s + 1);
            OpDesc d;
            d.kind = kind;
            d.count = 1;
            d.root = 4;
            requests.push_back(many.post(s, d));
        }
        rig.settle();
        many.die(4);
        many.let_go(1, 0);
        for (int s : many.all) {
            if (s == 4) continue;
            const auto& got = many.out[static_cast<std::size_t>(s)];
            EXPECT(requests[static_cast<std::size_t>(s)]->done && requests[static_cast<std::size_t>(s)]->status.ok());
            if (kind == OpKind::Broadcast) EXPECT_EQ(got[0], 0.5);
            else
                for (int r : many.all) EXPECT_EQ(got[static_cast<std::size_t>(r)], 0.1 * (r + 1));
        }
    }
}

// All but the first rank call something whose root is dead, which fails at once and sends nothing; the first one of a sum's tree sends
// nothing before it has heard from those below. (Simulator, seed 9094.)
FT_TEST(first_of_a_tree_finds_out_that_the_others_call_something_else) {
    Many many;
    auto& rig = many.rig;
    many.die(8);
    std::int64_t value = 1;
    const auto sum = rig.sum(0, value);
    std::int64_t word = 0;
    for (int s = 1; s < 8; ++s) {
        OpDesc d;
        d.kind = OpKind::Broadcast;
        d.dtype = DType::Int64;
        d.count = 1;
        d.root = 8;
        d.recv = &word;
        const auto r = rig.node(s).collective(rig.now(), Rig::kComm, d);
        rig.settle();
        EXPECT(r->done && r->status.code == Code::PeerFailure);
    }
    EXPECT(!sum->done);
    many.pass_ticks(4);
    REQUIRE(sum->done);
    EXPECT(sum->status.code == Code::Mismatch);
}

}  // namespace ftcomm::unit
