// Ranks of one host that share its processors: fewer waits, which cost them a switch each.
#include <algorithm>
#include <numeric>
#include <set>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

constexpr int kFive = 5;

Rig::Setup setup_of(bool crowded) {
    Rig::Setup s;
    s.reads = true;
    s.crowded = crowded;
    s.max_payload = 65536;
    return s;
}

struct Crowd {
    Rig rig;
    std::vector<int> all;
    std::vector<std::vector<std::int64_t>> data;
    std::vector<RequestPtr> requests;

    Crowd(Rig::Setup setup, std::size_t count, Policy policy = Policy::Lossy)
        : rig(kFive, setup), all(kFive), data(kFive, std::vector<std::int64_t>(count)) {
        std::iota(all.begin(), all.end(), 0);
        rig.comm(all, Rig::kComm, policy);
    }
    void enter_all(DType dtype = DType::Int64) {
        for (int slot = 0; slot < kFive; ++slot) {
            auto& mine = data[static_cast<std::size_t>(slot)];
            std::iota(mine.begin(), mine.end(), slot);
            OpDesc d;
            d.kind = OpKind::AllReduce;
            d.dtype = dtype;
            d.count = mine.size() * sizeof(std::int64_t) / size_of(dtype);
            d.recv = mine.data();
            requests.push_back(rig.node(slot).collective(rig.now(), Rig::kComm, d));
        }
    }
    void go_on() { rig.go_on(all); }
    bool is_done(int slot) const { return requests[static_cast<std::size_t>(slot)]->done; }
    bool has_all(int slot) const {
        const auto& got = data[static_cast<std::size_t>(slot)];
        const auto& request = *requests[static_cast<std::size_t>(slot)];
        bool all = request.done && request.status.ok() && request.outcome.contributors == RankSet::first(kFive);
        for (std::size_t i = 0; i < got.size(); ++i)
            all &= got[i] == kFive * static_cast<std::int64_t>(i) + kFive * (kFive - 1) / 2;
        return all;
    }
};

constexpr std::size_t kFrame = 65536 / sizeof(std::int64_t);

}  // namespace

FT_TEST(middle_sums_go_along_a_tree_where_ranks_share_processors) {
    for (bool crowded : {false, true}) {
        Crowd sums(setup_of(crowded), kFrame);
        sums.enter_all();
        sums.go_on();
        for (int slot = 0; slot < kFive; ++slot) EXPECT(sums.has_all(slot));
        EXPECT_EQ(sums.rig.traced(3, "run.tree"), crowded);
    }
}

// Crowd of narrow floats go up as float32. What does not fit a frame so would go straight, from each to each.
FT_TEST(what_fits_no_tree_is_as_small_as_elsewhere) {
    for (auto dtype : {DType::BFloat16, DType::Int8, DType::Float64})
        for (std::size_t bytes : {std::size_t{16384}, std::size_t{32768}, std::size_t{65536}}) {
            Crowd sums(setup_of(true), bytes / sizeof(std::int64_t));
            sums.enter_all(dtype);
            sums.go_on();
            for (const auto& r : sums.requests) EXPECT(r->done && r->status.ok());
            EXPECT_EQ(sums.rig.traced(2, "run.tree"), bytes * sizeof(float) <= 65536 * std::min(size_of(dtype), sizeof(float)));
            EXPECT(!sums.rig.traced(2, "run.flat"));
        }
}

// A later generation may be on other machines.
FT_TEST(under_replay_the_machine_does_not_choose_the_order_of_a_sum) {
    auto setup = setup_of(true);
    setup.replay = true;
    Crowd sums(setup, kFrame, Policy::Replay);
    sums.enter_all();
    sums.go_on();
    EXPECT(sums.has_all(0) && !sums.rig.traced(0, "run.tree") && !sums.rig.traced(0, "run.flat"));
}

// Position 0 hears from all, and answers them. Whoever it has not answered has all the same data as those who returned.
FT_TEST(rank_that_answers_the_fence_may_die_in_it) {
    Crowd sums(setup_of(true), 2 * kFrame);
    for (int slot : {3, 4}) sums.rig.hold(0, slot);
    sums.enter_all();
    sums.go_on();
    auto& rig = sums.rig;
    const auto is_answer = [&rig](int slot) { return rig.in_flight(0, slot) == 1 && rig.carries(0, slot, FrameKind::Fence); };
    for (bool more = true; more;) {
        more = false;
        for (int slot : {3, 4})
            while (!is_answer(slot) && rig.deliver(0, slot)) more = true;
        sums.go_on();
    }
    REQUIRE(rig.traced(0, "run.pull"));
    REQUIRE(sums.is_done(0) && sums.is_done(1) && sums.is_done(2) && !sums.is_done(3) && !sums.is_done(4));
    for (int slot : {3, 4}) EXPECT(rig.carries(0, slot, FrameKind::Fence));
    rig.kill(0);
    for (int slot = 1; slot < kFive; ++slot) rig.evidence(slot, 0, Evidence::Pidfd);
    rig.go_on({1, 2, 3, 4});
    for (int slot = 1; slot < kFive; ++slot) EXPECT(sums.has_all(slot));
}

FT_TEST(without_room_for_a_ticket_a_sum_comes_in_frames) {
    for (const auto& full : {std::set<int>{1}, std::set<int>{0, 1, 2, 3, 4}}) {
        auto setup = setup_of(true);
        setup.full = full;
        Crowd sums(setup, 2 * kFrame);
        sums.enter_all();
        sums.go_on();
        for (int slot = 0; slot < kFive; ++slot) EXPECT(sums.has_all(slot));
        EXPECT(sums.rig.traced(0, "run.pull") && sums.rig.traced(0, "run.repair"));
    }
}

FT_TEST(nobody_returns_before_all_have_begun_the_fence) {
    for (int late = 0; late < kFive; ++late) {
        Crowd sums(setup_of(true), 2 * kFrame);
        std::vector<int> others;
        for (int slot = 0; slot < kFive; ++slot)
            if (slot != late) others.push_back(slot);
        // It has entered, and reads nothing: it hears of no sum.
        sums.enter_all();
        for (int slot : others) sums.rig.hold(slot, late);
        sums.go_on();
        for (int slot = 0; slot < kFive; ++slot) EXPECT(!sums.is_done(slot));
        for (int slot : others) sums.rig.hold(slot, late, false);
        sums.go_on();
        for (int slot = 0; slot < kFive; ++slot) EXPECT(sums.has_all(slot));
    }
}

}  // namespace ftcomm::unit
