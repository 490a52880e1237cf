// Small reduces, reduce-scatters and all-to-alls: all have a sum, or what each has for each, and a rank is given what it has called for of it.
#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "base/crc32c.h"
#include "collectives/op_state.h"
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

struct Part {
    std::vector<std::int64_t> send, recv;
    RequestPtr request;

    // Two elements for the root, or for each rank: those of `rank` begin with 10 * (rank + 1).
    Part(Rig& rig, int rank, OpKind kind, int root, CommId comm = Rig::kComm, int slot = -1) {
        const bool scatters = kind == OpKind::ReduceScatter;
        send.resize(scatters ? 6 : 2);
        std::iota(send.begin(), send.end(), 10 * (rank + 1));
        recv = {-1, -1};
        OpDesc d;
        d.kind = kind;
        d.dtype = DType::Int64;
        d.count = 2;
        d.root = root;
        d.send = send.data();
        d.recv = scatters || rank == root ? recv.data() : nullptr;
        request = rig.node(slot < 0 ? rank : slot).collective(rig.now(), comm, d);
    }
    bool has_given(std::int64_t first, int contributors = 3) const { return recv[0] == first && recv[1] == first + contributors; }
    bool is_as_before() const { return recv[0] == -1 && recv[1] == -1; }
};

struct Swap {
    std::vector<std::int64_t> send, recv;
    RequestPtr request;

    // One element for each rank: 10 * (rank + 1) + its rank.
    Swap(Rig& rig, int rank, int size, std::shared_ptr<PerRank> layout = nullptr)
        : send(static_cast<std::size_t>(size)), recv(send.size(), -1) {
        std::iota(send.begin(), send.end(), 10 * (rank + 1));
        OpDesc d;
        d.kind = OpKind::AllToAll;
        d.dtype = DType::Int64;
        d.count = layout == nullptr ? 1 : 0;
        d.layout = std::move(layout);
        d.send = send.data();
        d.recv = recv.data();
        request = rig.node(rank).collective(rig.now(), Rig::kComm, d);
    }
    bool has_all(int rank, int size) const {
        bool all = request->done && request->status.ok() && request->outcome.contributors == RankSet::first(size);
        for (int r = 0; r < size; ++r) all &= recv[static_cast<std::size_t>(r)] == 10 * (r + 1) + rank;
        return all;
    }
    bool is_as_before() const {
        return std::all_of(recv.begin(), recv.end(), [](auto x) { return x == -1; });
    }
};

}  // namespace

FT_TEST(small_exchange_takes_one_message_time) {
    for (int size : {2, 3, 6}) {
        Rig::Setup setup;
        if (size > 4) setup.spread_degree = 2;  // along a tree
        Rig rig(size, setup);
        std::vector<int> all(static_cast<std::size_t>(size));
        std::iota(all.begin(), all.end(), 0);
        rig.comm(all);
        for (int round = 0; round < 3; ++round) {
            std::vector<Swap> swaps;
            for (int s : all) swaps.emplace_back(rig, s, size);
            rig.settle();
            for (int s : all) EXPECT(swaps[static_cast<std::size_t>(s)].has_all(s, size));
        }
        EXPECT(rig.traced(0, size > 4 ? "run.tree" : "run.flat") && !rig.traced(0, "run.direct"));
    }
}

// As of a sum, below: rank 0 hands out what it keeps, of two ranks also where it has only its part of what the other one sent.
FT_TEST(exchange_that_is_kept_is_handed_to_who_lacks_it) {
    for (int size : {2, 3}) {
        Rig rig(size);
        rig.comm(size == 2 ? std::vector<int>{0, 1} : kThree);
        rig.hold(size == 3 ? 2 : 0, 1);
        std::vector<Swap> swaps;
        for (int s = 0; s < size; ++s) swaps.emplace_back(rig, s, size);
        rig.settle();
        REQUIRE(swaps[0].request->done && !swaps[1].request->done);
        swaps[0].send.assign(swaps[0].send.size(), 0);  // the caller's again
        if (size == 3) {
            rig.kill(2);
            for (int s : {0, 1}) rig.evidence(s, 2, Evidence::Pidfd);
        } else {
            rig.node(1).fail_request(rig.now(), swaps[1].request, Code::Cancelled);
            rig.settle();
            rig.hold(0, 1, false);
        }
        rig.settle();
        EXPECT(rig.traced(0, "hand_out.kept"));
        EXPECT(swaps[0].has_all(0, size) && swaps[1].has_all(1, size));
    }
}

// Nobody has returned, and what rank 2 had for them is lost: it fails, as a large one does, and has written nothing.
FT_TEST(small_exchange_fails_with_who_has_not_sent) {
    Rig rig(3);
    rig.comm(kThree);
    std::vector<Swap> swaps;
    for (int s : {0, 1}) swaps.emplace_back(rig, s, 3);
    rig.settle();
    rig.kill(2);
    for (int s : {0, 1}) rig.evidence(s, 2, Evidence::Pidfd);
    rig.settle();
    for (const auto& s : swaps) {
        REQUIRE(s.request->done);
        EXPECT_EQ(s.request->status.code, Code::PeerFailure);
        EXPECT(s.is_as_before());
    }
    swaps.clear();
    for (int s : {0, 1}) swaps.emplace_back(rig, s, 3);  // it goes on without it
    rig.settle();
    for (int s : {0, 1}) {
        const auto& one = swaps[static_cast<std::size_t>(s)];
        REQUIRE(one.request->done && one.request->status.ok());
        EXPECT(one.request->outcome.contributors == RankSet::first(2));
        EXPECT((one.recv == std::vector<std::int64_t>{10 + s, 20 + s, 0}));
    }
}

// What others have for each other is not known to who calls without counts: all go directly, whoever comes first, and later calls are as ever.
FT_TEST(exchange_with_and_without_counts_goes_directly) {
    auto layout = std::make_shared<PerRank>();
    layout->send_counts = layout->recv_counts = {1, 1, 1};
    layout->send_offsets = layout->recv_offsets = {0, 1, 2};
    for (int late : {-1, 0, 1, 2}) {  // comes when the others have voted
        Rig rig(3);
        rig.comm(kThree);
        for (int round = 0; round < 2; ++round) {
            std::map<int, Swap> swaps;
            const auto post = [&](int s) { swaps.try_emplace(s, rig, s, 3, s == 1 ? layout : nullptr); };
            for (int s : kThree)
                if (s != late) post(s);
            rig.settle();
            if (late >= 0) post(late);
            rig.settle();
            for (int s : kThree) EXPECT(swaps.at(s).has_all(s, 3));
        }
        EXPECT(rig.traced(0, "exchange.direct") && !rig.traced(1, "exchange.direct"));
        const Swap after[] = {{rig, 0, 3}, {rig, 1, 3}, {rig, 2, 3}};
        rig.settle();
        EXPECT(after[0].has_all(0, 3) && after[2].has_all(2, 3) && rig.traced(1, "run.flat"));
    }
}

// And when what one has is not what another one expects, they say so; so do a small and a large one without counts.
FT_TEST(exchange_of_other_sizes_is_refused) {
    auto layout = std::make_shared<PerRank>();
    layout->send_counts = {1, 0};
    layout->recv_counts = {1, 1};
    layout->send_offsets = layout->recv_offsets = {0, 1};
    Rig rig(2);
    rig.comm({0, 1});
    const Swap with(rig, 0, 2, layout), without(rig, 1, 2);
    rig.settle();
    for (const auto* s : {&with, &without}) {
        REQUIRE(s->request->done);
        EXPECT_EQ(s->request->status.code, Code::Mismatch);
    }
    const Swap small(rig, 0, 2);
    std::vector<std::int64_t> send(40'000), recv(40'000);
    OpDesc d;
    d.kind = OpKind::AllToAll;
    d.dtype = DType::Int64;
    d.count = 20'000;
    d.send = send.data();
    d.recv = recv.data();
    const auto large = rig.node(1).collective(rig.now(), Rig::kComm, d);
    rig.settle();
    EXPECT(small.request->done && small.request->status.code == Code::Mismatch);
    EXPECT(large->done && large->status.code == Code::Mismatch);
}

FT_TEST(small_reduce_is_given_to_its_root_alone) {
    Rig rig(3);
    rig.comm(kThree);
    std::vector<Part> parts;
    for (int s : kThree) parts.emplace_back(rig, s, OpKind::Reduce, 1);
    rig.settle();
    EXPECT(rig.traced(0, "run.flat"));
    for (int s : kThree) {
        const auto& p = parts[static_cast<std::size_t>(s)];
        REQUIRE(p.request->done && p.request->status.ok());
        EXPECT(p.request->outcome.contributors == RankSet::first(3));
        EXPECT_EQ(p.request->outcome.chunks.size(), s == 1 ? 1u : 0u);
        EXPECT(s == 1 ? p.has_given(60) : p.is_as_before());
        EXPECT_EQ(p.send[0], 10 * (s + 1));
    }
}

// Rank 0 has returned, rank 1 lacks what rank 2 had sent to rank 0 alone: it is handed its part of what rank 0 keeps.
FT_TEST(part_of_a_kept_sum_is_handed_to_who_lacks_it) {
    for (auto kind : {OpKind::Reduce, OpKind::ReduceScatter}) {
        Rig rig(3);
        rig.comm(kThree);
        rig.hold(2, 1);
        std::vector<Part> parts;
        for (int s : kThree) parts.emplace_back(rig, s, kind, 1);
        rig.settle();
        REQUIRE(parts[0].request->done && !parts[1].request->done);
        parts[0].send.assign(parts[0].send.size(), 0);  // the caller's again
        rig.kill(2);
        for (int s : {0, 1}) rig.evidence(s, 2, Evidence::Pidfd);
        rig.settle();
        REQUIRE(parts[1].request->done && parts[1].request->status.ok());
        EXPECT(rig.traced(0, "hand_out.kept"));
        EXPECT(parts[1].request->outcome.contributors == RankSet::first(3));
        EXPECT(parts[1].has_given(kind == OpKind::Reduce ? 60 : 66));
        EXPECT(kind == OpKind::Reduce ? parts[0].is_as_before() : parts[0].has_given(60));
    }
}

// It was closed long ago at rank 0, and has had no turn since: a vote finds it all the same, twice.
FT_TEST(communicator_that_is_closed_and_at_rest_hands_out_what_it_keeps) {
    constexpr CommId kOther = 78;
    for (bool by_death : {false, true}) {
        Rig rig(3);
        rig.comm(kThree);
        rig.comm(kThree, kOther);
        rig.hold(2, 1);
        std::vector<Part> parts;
        for (int s : kThree) parts.emplace_back(rig, s, OpKind::ReduceScatter, 0);
        rig.settle();
        REQUIRE(parts[0].request->done && parts[2].request->done && !parts[1].request->done);
        rig.node(0).close_comm(rig.now(), Rig::kComm);
        rig.node(0).close_comm(rig.now(), kOther);
        for (int i = 0; i < 5; ++i) rig.tick(0);
        if (by_death) {
            rig.kill(2);
            for (int s : {0, 1}) rig.evidence(s, 2, Evidence::Pidfd);
        } else {
            rig.node(1).fail_request(rig.now(), parts[1].request, Code::Cancelled);
        }
        rig.settle();
        if (!by_death) {
            rig.hold(2, 1, false);
            rig.settle();
        }
        REQUIRE(parts[1].request->done && parts[1].request->status.ok());
        EXPECT(rig.traced(0, "hand_out.kept") && parts[1].has_given(66));
        for (int i = 0; i < 5; ++i) rig.tick(0);
        std::int64_t one = 1, two = 2;
        const auto first = rig.sum(1, one), second = rig.sum(by_death ? 1 : 2, two);
        rig.settle();
        EXPECT(!first->done && !second->done);
        if (!by_death) {
            rig.kill(2);
            rig.evidence(1, 2, Evidence::Pidfd);
        }
        rig.node(1).revoke(rig.now(), Rig::kComm);  // asks those for a vote that have it no more
        rig.settle();
        EXPECT(first->done && first->status.code == Code::Revoked);
    }
}

// Nobody has returned: it is done again without rank 2, from inputs that are as they were.
FT_TEST(small_reduce_scatter_goes_on_without_the_dead) {
    Rig rig(3);
    rig.comm(kThree);
    std::vector<Part> parts;
    for (int s : {0, 1}) parts.emplace_back(rig, s, OpKind::ReduceScatter, 0);
    rig.settle();
    rig.kill(2);
    for (int s : {0, 1}) rig.evidence(s, 2, Evidence::Pidfd);
    rig.settle();
    for (int s : {0, 1}) {
        const auto& p = parts[static_cast<std::size_t>(s)];
        REQUIRE(p.request->done && p.request->status.ok());
        EXPECT(p.request->outcome.contributors == RankSet::first(2));
        EXPECT(p.has_given(30 + 4 * s, 2));
        EXPECT_EQ(p.send[0], 10 * (s + 1));
    }
}

// A reduce is for its root: without it all fail, whether it died before they called or in the middle, as in a large one.
FT_TEST(small_reduce_fails_with_its_root) {
    for (bool before : {true, false}) {
        Rig rig(3);
        rig.comm(kThree);
        std::vector<Part> parts;
        const auto die = [&] {
            rig.kill(1);
            for (int s : {0, 2}) rig.evidence(s, 1, Evidence::Pidfd);
            rig.settle();
        };
        if (before) die();
        for (int s : {0, 2}) parts.emplace_back(rig, s, OpKind::Reduce, 1);
        rig.settle();
        if (!before) die();
        for (const auto& p : parts) {
            REQUIRE(p.request->done);
            EXPECT_EQ(p.request->status.code, Code::PeerFailure);
            EXPECT(p.is_as_before());
        }
    }
}

// As a job logs it whose limits are others, or another version: there each rank had a block, and not all of it.
FT_TEST(replay_says_when_a_part_was_logged_by_another_algorithm) {
    Rig::Setup setup;
    setup.replay = true;
    setup.one_host = false;
    Rig rig(3, setup);
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::vector<Part> parts;
    for (int round = 0; round < 2; ++round) {
        for (int s : kThree) parts.emplace_back(rig, s, OpKind::ReduceScatter, 0);
        rig.settle();
    }
    rig.kill(2);
    rig.evidence(0, 2, Evidence::Agent);
    rig.settle();
    for (auto& record : rig.log(2).streams[(LogKey{Rig::kComm, 2, kResults})]) {
        ByteReader r(record.payload);
        auto shape = Shape::decode(r);
        shape.algorithm = Algorithm::Auto;
        shape.blocks = 3;
        ByteWriter w;
        shape.encode(w);
        std::copy(w.view().begin(), w.view().end(), record.payload.begin());
        record.aux = shape.signature();
        record.crc = crc32c(record.payload.data(), record.payload.size());
    }
    rig.restart(2);
    rig.settle();
    rig.join_comm(2, kThree, Rig::kComm, Policy::Replay);
    rig.settle();
    const Part again(rig, 2, OpKind::ReduceScatter, 0);
    rig.settle();
    REQUIRE(again.request->done);
    EXPECT_EQ(again.request->status.code, Code::ReplayDiverged);
    EXPECT(again.request->status.message.find("by another algorithm") != std::string::npos);
    EXPECT(again.is_as_before());
}

// It was given up while it was held, and is complete as soon as it begins: the vote finds it so, and meanwhile the communicator was closed.
FT_TEST(part_that_is_complete_when_it_is_given_up_is_given) {
    constexpr CommId kPair = 77;
    Rig rig(4);
    rig.comm({0, 1, 2, 3});
    rig.comm({1, 2}, kPair);
    rig.ask_again(3, 0);
    for (int s : {0, 1, 2}) rig.node(s).admit(rig.now());
    Part one(rig, 0, OpKind::ReduceScatter, 0, kPair, 1), two(rig, 1, OpKind::ReduceScatter, 0, kPair, 2);
    rig.hold(0, 2);
    rig.settle();
    REQUIRE(!one.request->done && !two.request->done);
    rig.node(2).fail_request(rig.now(), two.request, Code::Cancelled);
    rig.hold(2, 1);
    rig.hold(0, 2, false);
    rig.settle();
    EXPECT(rig.traced(2, "run.flat"));
    EXPECT(!two.request->done);
    rig.node(2).close_comm(rig.now(), kPair);
    rig.hold(2, 1, false);
    rig.settle();
    REQUIRE(one.request->done && two.request->done);
    EXPECT(one.request->status.ok() && two.request->status.ok());
    EXPECT(one.has_given(30, 2) && two.has_given(34, 2));
}

// Its result is here, but could not be logged: what goes on with it, in another way, begins with the result.
FT_TEST(part_that_is_final_stays_what_it_is) {
    std::int64_t input[2] = {1, 2}, output[2] = {}, sum[2] = {5, 7};
    OpDesc d;
    d.kind = OpKind::Reduce;
    d.dtype = DType::Int64;
    d.count = 2;
    d.send = input;
    d.recv = output;
    Shape shape;
    shape.kind = d.kind;
    shape.dtype = d.dtype;
    shape.algorithm = Algorithm::Flat;
    shape.count = 2;
    const auto request = std::make_shared<Request>();
    OpState op(1, d, shape, Grid::make(1, 2, 2), 0, 1, request);
    EXPECT(op.input(0) == reinterpret_cast<std::byte*>(input));
    op.desc.recv = sum;
    op.set_final(0, RankSet::first(3));
    op.make_room();
    sum[0] = sum[1] = 0;
    op.give();
    EXPECT(output[0] == 5 && output[1] == 7);
    op.desc.recv = sum;  // it was done again
    sum[0] = 9;
    op.make_room();
    sum[0] = 0;
    op.give();
    EXPECT_EQ(output[0], 9);
    OpState fresh(1, d, shape, Grid::make(1, 2, 2), 0, 1, request);
    fresh.make_room();
    EXPECT(reinterpret_cast<std::int64_t*>(fresh.result(0))[1] == 2);
}

}  // namespace ftcomm::unit
