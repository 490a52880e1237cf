// All-reduces by windows of shared memory, of ranks that share the processors of one host.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/random.h"
#include "tests/window_rig.h"

namespace ftcomm::unit {
namespace {

struct Staged : Windowed {
    std::size_t count;
    std::vector<std::vector<std::int32_t>> data;

    static constexpr std::size_t kCount = 700;  // of 64 bytes each: 44 segments

    explicit Staged(int ranks, Rig::Setup setup = with_windows(), std::size_t count_in = kCount, Policy policy = Policy::Lossy)
        : Windowed(ranks, setup, policy), count(count_in), data(all.size(), std::vector<std::int32_t>(count)) {}
    void enter(int slot, int salt = 0) {
        auto& mine = data[static_cast<std::size_t>(slot)];
        for (std::size_t i = 0; i < count; ++i) mine[i] = input(slot, i, salt);
        OpDesc d;
        d.kind = OpKind::AllReduce;
        d.dtype = DType::Int32;
        d.count = count;
        d.recv = mine.data();
        requests[static_cast<std::size_t>(slot)] = rig.node(slot).collective(rig.now(), Rig::kComm, d);
    }
    std::int32_t sum(const std::vector<int>& of, std::size_t i, int salt = 0) const {
        std::int32_t total = 0;
        for (int slot : of) total += input(slot, i, salt);
        return total;
    }
    // Each part of its result is the sum over those that its outcome names.
    void expect_what_is_said(int slot) const {
        const auto& request = *requests[static_cast<std::size_t>(slot)];
        REQUIRE(request.done && request.status.ok());
        for (const auto& chunk : request.outcome.chunks)
            for (auto i = chunk.offset; i < chunk.offset + chunk.count; ++i)
                EXPECT_EQ(data[static_cast<std::size_t>(slot)][i], sum(chunk.contributors.list(), i));
    }
    bool has(int slot, const std::vector<int>& of, int salt = 0) const {
        const auto& request = *requests[static_cast<std::size_t>(slot)];
        bool all = request.done && request.status.ok() && request.outcome.contributors == RankSet::of(of);
        for (std::size_t i = 0; i < count; ++i) all &= data[static_cast<std::size_t>(slot)][i] == sum(of, i, salt);
        return all;
    }
};

}  // namespace

FT_TEST(ranks_that_share_processors_add_in_windows) {
    for (int ranks : {3, 4, 7, 16})
        for (std::size_t count : {17, 40, 700, 2047}) {
            Staged sums(ranks, with_windows(), count);
            for (int salt : {0, 1, 2}) {  // in the same windows
                for (int slot : sums.all) sums.enter(slot, salt);
                sums.rig.go_on(sums.all);
                for (int slot : sums.all) EXPECT(sums.has(slot, sums.all, salt));
            }
            EXPECT(sums.rig.traced(0, "run.stage") && !sums.rig.traced(0, "run.pull"));
        }
}

// Once they know each other's boards nobody is told anything but by the last one of each step, whichever that is, and it tells each other one once.
FT_TEST(who_knows_the_boards_is_told_by_the_last_one_only) {
    for (int last : {0, 2, 3}) {
        Staged sums(4, with_windows(), 60);  // one chunk
        for (int slot : sums.all) sums.enter(slot);
        sums.rig.go_on(sums.all);
        const auto under_way = [&](int from) {
            std::size_t all = 0;
            for (int to : sums.all) {
                if (to == from) continue;
                EXPECT(!sums.rig.carries(from, to, FrameKind::StageEnter));
                const auto n = sums.rig.in_flight(from, to);
                EXPECT(n == 0 || sums.rig.carries(from, to, FrameKind::StageGo));
                all += n;
            }
            return all;
        };
        const auto deliver = [&](int from) {
            for (int to : sums.all) sums.rig.deliver_all(from, to);
        };
        const auto order = [&] {
            std::vector<int> all;
            for (int slot : sums.all)
                if (slot != last) all.push_back(slot);
            all.push_back(last);
            return all;
        }();
        for (int slot : order) sums.enter(slot, 1);
        // Input, sum and finals: the last one of each goes on at once, and is the first of the next.
        for (int step = 0; step < 3; ++step) {
            std::vector<int> told;
            for (int slot : order) {
                while (!sums.requests[static_cast<std::size_t>(slot)]->done && sums.rig.work(slot)) {}
                const auto frames = under_way(slot);
                EXPECT(frames == 0 || frames == 3);
                if (frames > 0) told.push_back(slot);
            }
            EXPECT(told == std::vector<int>{step == 0 ? last : order[step == 1 ? 2 : 3]});
            if (told.empty()) break;
            deliver(told[0]);
        }
        for (int slot : sums.all) EXPECT(sums.has(slot, sums.all, 1));
    }
}

// Each block by its owner, to where it belongs: elsewhere, or in its place in the input.
FT_TEST(ranks_that_share_processors_scatter_sums_in_windows) {
    for (int ranks : {3, 4, 7, 16})
        for (const auto& [count, in_place] : {std::pair<std::size_t, bool>{17, false}, {40, true}, {700, false}, {700, true}}) {
            Windowed scatters(ranks);
            auto& [rig, all, requests] = scatters;
            for (int salt : {0, 1}) {
                std::vector<std::vector<std::int32_t>> in(all.size()), out(all.size());
                for (int slot : all) {
                    auto& mine = in[static_cast<std::size_t>(slot)];
                    mine.resize(count * all.size());
                    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = Staged::input(slot, i, salt);
                    out[static_cast<std::size_t>(slot)].assign(count, -1);
                    OpDesc d;
                    d.kind = OpKind::ReduceScatter;
                    d.dtype = DType::Int32;
                    d.count = count;
                    d.send = mine.data();
                    d.recv = in_place ? mine.data() + static_cast<std::size_t>(slot) * count
                                      : out[static_cast<std::size_t>(slot)].data();
                    requests[static_cast<std::size_t>(slot)] = rig.node(slot).collective(rig.now(), Rig::kComm, d);
                }
                rig.go_on(all);
                for (int slot : all) {
                    const auto s = static_cast<std::size_t>(slot);
                    EXPECT(requests[s]->done && requests[s]->status.ok());
                    for (std::size_t i = 0; i < count; ++i) {
                        std::int32_t total = 0;
                        for (int from : all) total += Staged::input(from, s * count + i, salt);
                        EXPECT_EQ(in_place ? in[s][s * count + i] : out[s][i], total);
                    }
                }
            }
            EXPECT(rig.traced(0, "run.stage") && !rig.traced(0, "run.pull"));
        }
}

FT_TEST(who_does_not_share_processors_needs_no_windows) {
    auto alone = with_windows();
    alone.crowded = false;
    auto apart = with_windows();
    apart.reads = false;
    const std::vector<std::pair<int, Rig::Setup>> cases{
        {4, alone}, {4, apart}, {2, with_windows()}, {17, with_windows()}, {4, with_windows(false)}};
    for (const auto& [ranks, setup] : cases) {
        Staged sums(ranks, setup, 200);
        for (int slot : sums.all) sums.enter(slot);
        sums.rig.go_on(sums.all);
        for (int slot : sums.all) EXPECT(sums.has(slot, sums.all) && !sums.rig.traced(slot, "run.stage"));
    }
}

// To the last bit, and so under replay, too, wherever a replacement comes up.
FT_TEST(sums_of_windows_are_those_without_them) {
    constexpr std::size_t kBlock = 150;
    const auto sums = [](int ranks, Rig::Setup setup, OpKind kind, ReduceOp op, DType dtype, bool* staged) {
        Windowed adders(ranks, setup, setup.replay ? Policy::Replay : Policy::Lossy);
        auto& [rig, all, requests] = adders;
        const auto blocks = kind == OpKind::ReduceScatter ? all.size() : 1;
        std::vector<Bytes> in, out;
        for (int slot : all) {
            Random values(static_cast<std::uint64_t>(slot) + 1);
            in.emplace_back(kBlock * blocks * size_of(dtype));
            out.emplace_back(kBlock * size_of(dtype));
            for (std::size_t i = 0; i < kBlock * blocks; ++i) {
                const auto value =
                    static_cast<float>(values.between(0, 1 << 20)) / 3.0F / static_cast<float>(1 << values.between(0, 15));
                const auto bits = std::bit_cast<std::uint32_t>(value);
                if (dtype == DType::Float32) std::memcpy(in.back().data() + 4 * i, &bits, 4);
                else std::memcpy(in.back().data() + 2 * i, reinterpret_cast<const std::byte*>(&bits) + 2, 2);
            }
        }
        for (int slot : all) {
            const auto s = static_cast<std::size_t>(slot);
            OpDesc d;
            d.kind = kind;
            d.dtype = dtype;
            d.count = kBlock;
            d.op = op;
            d.root = 1;
            if (kind != OpKind::AllReduce) d.send = in[s].data();
            else out[s] = in[s];
            d.recv = out[s].data();
            requests[s] = rig.node(slot).collective(rig.now(), Rig::kComm, d);
        }
        rig.go_on(all);
        for (const auto& r : requests) EXPECT(r->done && r->status.ok());
        *staged = rig.traced(0, "run.stage");
        return out;
    };
    for (int ranks : {3, 4, 7})
        for (const auto& [kind, op] : {std::pair{OpKind::AllReduce, ReduceOp::Sum},
                                       {OpKind::AllReduce, ReduceOp::Avg},
                                       {OpKind::ReduceScatter, ReduceOp::Sum},
                                       {OpKind::Reduce, ReduceOp::Sum}})
            for (const auto& [pull_limit, reads] : {std::pair<std::uint64_t, bool>{1, true}, {1, false}, {1 << 30, true}})
                for (bool replay : {false, true})
                    for (auto dtype : {DType::Float32, DType::BFloat16}) {
                        auto windows = with_windows();
                        windows.pull_limit = pull_limit;
                        windows.reads = reads;
                        windows.near = true;
                        windows.replay = replay;
                        auto without = windows;
                        without.crowded = false;
                        bool staged = false, no = false;
                        const auto a = sums(ranks, windows, kind, op, dtype, &staged);
                        const auto b = sums(ranks, without, kind, op, dtype, &no);
                        windows.windowless = {0};  // (the root of a reduce needs none)
                        bool tried = false;
                        const auto refused = sums(ranks, windows, kind, op, dtype, &tried);
                        const bool rounds_on_the_way = dtype == DType::BFloat16 && !(reads && pull_limit == 1);
                        const bool in_groups = !reads && kind == OpKind::AllReduce;  // or as a ring, where there are none
                        EXPECT(!no && staged == !(replay && (rounds_on_the_way || in_groups)));
                        EXPECT((rounds_on_the_way && !replay) || a == b);
                        EXPECT(tried == staged && refused == b);
                    }
}

FT_TEST(without_room_for_windows_sums_come_without) {
    for (const auto& setup : without_room()) {
        Staged sums(4, setup);
        for (int salt : {0, 1}) {
            for (int slot : sums.all) sums.enter(slot, salt);
            sums.rig.go_on(sums.all);
            for (int slot : sums.all) EXPECT(sums.has(slot, sums.all, salt));
        }
        EXPECT(sums.goes_on_without(setup, "run.stage"));
    }
}

// Of whoever leads, or it is found out again.
FT_TEST(a_replacement_hears_that_there_is_no_room_for_windows) {
    for (int replaced : {0, 3})
        for (auto setup : without_room()) {
            setup.replay = true;
            if (!setup.reads) setup.pull_limit = 1 << 30;  // in groups there is another order, and no windows
            Staged sums(4, setup, Staged::kCount, Policy::Replay);
            for (int slot : sums.all) sums.enter(slot);
            sums.rig.go_on(sums.all);
            for (int slot : sums.all) EXPECT(sums.has(slot, sums.all));
            sums.rig.replace(replaced, 1, sums.all);
            sums.rig.go_on(sums.all);
            sums.enter(replaced);
            sums.rig.go_on(sums.all);
            EXPECT(sums.has(replaced, sums.all));
            for (int slot : sums.all) sums.enter(slot, 1);
            sums.rig.go_on(sums.all);
            for (int slot : sums.all) EXPECT(sums.has(slot, sums.all, 1));
            EXPECT(sums.goes_on_without(setup, "run.stage") && sums.rig.node(replaced).lacks_windows());
        }
}

// Wherever one of five dies, the others have the sum of those who are left, or of all.
FT_TEST(death_among_windows_is_survived_by_the_others) {
    for (int dying : {0, 2, 4})
        for (int pieces = 0; pieces < 90; pieces += 7) {
            Staged sums(5);
            for (int slot : sums.all) sums.enter(slot);
            std::vector<int> left;
            for (int slot : sums.all)
                if (slot != dying) left.push_back(slot);
            for (int i = 0; i < pieces; ++i) {
                sums.rig.go_on(left);
                if (!sums.rig.work(dying)) break;
            }
            sums.rig.kill(dying);
            for (int slot : left) sums.rig.evidence(slot, dying, Evidence::Pidfd);
            sums.rig.go_on(left);
            for (int slot : left) {
                sums.expect_what_is_said(slot);
                EXPECT(sums.data[static_cast<std::size_t>(slot)] == sums.data[static_cast<std::size_t>(left[0])]);
            }
        }
}

// Under replay the others wait for its replacement, and all have the sum of all; those that were done with it, and whoever comes later, from
// the logs.
FT_TEST(death_among_windows_is_made_good_under_replay) {
    const std::vector<int> left{0, 1, 3};
    constexpr int kDying = 2;
    bool complete = false;
    for (int pieces = 0; !complete; pieces += 5) {
        auto setup = with_windows();
        setup.replay = true;
        Staged sums(4, setup, Staged::kCount, Policy::Replay);
        auto& rig = sums.rig;
        for (int slot : sums.all) sums.enter(slot);
        for (int i = 0; i < pieces; ++i) {
            rig.go_on(left);
            if (!rig.work(kDying)) break;
        }
        rig.go_on(left);
        EXPECT(rig.traced(0, "run.stage") && pieces < 200);
        complete = sums.has(kDying, sums.all);
        rig.replace(kDying, 0, sums.all);
        rig.go_on(sums.all);
        sums.enter(kDying);
        rig.go_on(sums.all);
        for (int slot : sums.all) EXPECT(sums.has(slot, sums.all));
        rig.replace(3, 0, sums.all);
        rig.go_on(sums.all);
        sums.enter(3);
        rig.go_on({3});
        EXPECT(sums.has(3, sums.all));
    }
}

// C9: it was stopped while it copied finals out of windows, and those who have gone on without it have something else there. What it takes for
// a final is one, and all else of its buffer is its input still (invariant B).
FT_TEST(rank_that_was_stopped_takes_nothing_of_a_later_sum_out_of_a_window) {
    constexpr int kStopped = 1;
    const std::vector<int> others{0, 2, 3, 4};
    int found = 0;
    for (int pieces = 0; pieces < 140; ++pieces) {
        Staged sums(5);
        auto& rig = sums.rig;
        for (int slot : sums.all) sums.enter(slot);
        for (int i = 0; i < pieces; ++i) {
            rig.go_on(others);
            if (!rig.work(kStopped)) break;
        }
        if (sums.requests[kStopped]->done) break;
        for (int slot : others) {
            rig.hold(slot, kStopped);
            rig.hold(kStopped, slot);
            rig.evidence(slot, kStopped, Evidence::Pidfd);
        }
        rig.go_on(others);
        for (int slot : others) {
            REQUIRE(sums.requests[static_cast<std::size_t>(slot)]->done);
            sums.enter(slot, 1);
        }
        rig.go_on(others);
        for (int slot : others) EXPECT(sums.has(slot, others, 1));
        while (rig.work(kStopped)) {}
        bool some = false;
        for (std::size_t i = 0; i < sums.count; ++i) {
            const auto mine = sums.data[kStopped][i];
            EXPECT(mine == Staged::input(kStopped, i, 0) || mine == sums.sum(sums.all, i));
            some |= mine != Staged::input(kStopped, i, 0);
        }
        found += some;
    }
    EXPECT(found > 20);
}

// The same of a reduce-scatter in place, whose sum does not count: its input is as it was.
FT_TEST(sum_that_does_not_count_has_not_cost_the_input_in_whose_place_it_is) {
    constexpr std::size_t kBlock = 120;
    RunsAhead schedule;
    for (int pieces = 0; pieces < 60; ++pieces) {
        Staged unused(5);
        auto& rig = unused.rig;
        std::vector<std::vector<std::int32_t>> data(5);
        std::vector<RequestPtr> requests;
        for (int slot : unused.all) {
            auto& mine = data[static_cast<std::size_t>(slot)];
            mine.resize(5 * kBlock);
            for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = Staged::input(slot, i, 0);
            OpDesc d;
            d.kind = OpKind::ReduceScatter;
            d.dtype = DType::Int32;
            d.count = kBlock;
            d.send = mine.data();
            d.recv = mine.data() + static_cast<std::size_t>(slot) * kBlock;
            requests.push_back(rig.node(slot).collective(rig.now(), Rig::kComm, d));
        }
        std::vector<std::int32_t> more(600, 123456789);
        if (!schedule.run(rig, requests, pieces, OpKind::AllReduce, more)) break;
        for (int slot : schedule.left) {
            const auto s = static_cast<std::size_t>(slot);
            REQUIRE(requests[s]->done && requests[s]->status.ok());
            for (const auto& chunk : requests[s]->outcome.chunks)
                for (auto i = chunk.offset; i < chunk.offset + chunk.count; ++i) {
                    std::int32_t total = 0;
                    for (int from : chunk.contributors.list()) total += Staged::input(from, s * kBlock + i, 0);
                    EXPECT_EQ(data[s][s * kBlock + i], total);
                }
        }
    }
    EXPECT(schedule.reused > 5);
}

// C9, of those who add: a rank that has left the attempt puts another communicator's input into the window, which an owner still adds up.
FT_TEST(owner_adds_nothing_that_another_communicators_sum_has_put_into_a_window) {
    RunsAhead schedule;
    for (int pieces = 0; pieces < 60; ++pieces) {
        Staged sums(5);
        for (int slot : sums.all) sums.enter(slot);
        std::vector<std::int32_t> more(sums.count, 123456789);
        if (!schedule.run(sums.rig, sums.requests, pieces, OpKind::AllReduce, more)) break;
        for (int slot : schedule.left) sums.expect_what_is_said(slot);
    }
    EXPECT(schedule.reused > 5);
}

}  // namespace ftcomm::unit
