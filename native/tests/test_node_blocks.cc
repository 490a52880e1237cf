// Broadcasts, all-gathers and all-to-alls by windows of shared memory, of ranks that share the processors of one host.
#include <algorithm>

#include "tests/window_rig.h"

namespace ftcomm::unit {
namespace {

struct Sharing : Windowed {
    static constexpr std::int32_t kNothing = -1;
    OpKind kind;
    int root;
    CommId comm = Rig::kComm;
    std::size_t count;  // of a block
    std::vector<std::vector<std::int32_t>> data, own;

    Sharing(int ranks, OpKind kind_in, std::size_t count_in, int root_in = 0, Rig::Setup setup = with_windows())
        : Windowed(ranks, setup), kind(kind_in), root(root_in), count(count_in), data(all.size()), own(all.size()) {}
    static std::int32_t value(int owner, std::size_t i, int salt) {
        return static_cast<std::int32_t>(i) * (owner + 1) + salt * 1000003 + owner;
    }
    std::size_t blocks() const { return kind == OpKind::Broadcast ? 1 : all.size(); }
    int owner(std::size_t block) const { return kind == OpKind::Broadcast ? root : static_cast<int>(block); }
    RequestPtr& request(int slot) { return requests[static_cast<std::size_t>(slot)]; }
    std::vector<std::int32_t>& of(int slot) { return data[static_cast<std::size_t>(slot)]; }

    void enter(int slot, int salt = 0) {
        const auto s = static_cast<std::size_t>(slot);
        data[s].assign(count * blocks(), kNothing);
        own[s].resize(count);
        for (std::size_t i = 0; i < count; ++i) own[s][i] = value(slot, i, salt);
        OpDesc d;
        d.kind = kind;
        d.dtype = DType::Int32;
        d.count = count;
        d.root = root;
        d.recv = data[s].data();
        if (kind == OpKind::AllGather) d.send = own[s].data();
        else if (slot == root) data[s] = own[s];
        requests[s] = rig.node(slot).collective(rig.now(), comm, d);
    }
    void meet() {  // one operation, in which the ranks' boards become known
        for (int slot : all) enter(slot);
        rig.go_on(all);
        for (int slot : all) EXPECT(has_all(slot));
    }
    bool has(int slot, std::size_t block, int salt = 0) {
        for (std::size_t i = 0; i < count; ++i)
            if (of(slot)[block * count + i] != value(owner(block), i, salt)) return false;
        return true;
    }
    bool has_all(int slot, int salt = 0) {
        bool yes = request(slot)->done && request(slot)->status.ok();
        for (std::size_t b = 0; b < blocks(); ++b) yes &= has(slot, b, salt);
        return yes;
    }
};

const std::pair<OpKind, int> kWhat[] = {{OpKind::Broadcast, 0}, {OpKind::Broadcast, 2}, {OpKind::AllGather, 0}};

}  // namespace

FT_TEST(ranks_that_share_processors_share_blocks_in_windows) {
    for (const auto& [kind, root] : kWhat)
        for (int ranks : {3, 4, 7, 16})
            for (std::size_t count : {17, 40, 700, 2047}) {
                Sharing blocks(ranks, kind, count, root);
                for (int salt : {0, 1, 2}) {  // in the same windows
                    for (int slot : blocks.all) blocks.enter(slot, salt);
                    blocks.rig.go_on(blocks.all);
                    for (int slot : blocks.all) EXPECT(blocks.has_all(slot, salt));
                }
                EXPECT(blocks.rig.traced(0, "run.blocks") && !blocks.rig.traced(0, "run.pull"));
            }
}

FT_TEST(without_room_for_windows_blocks_come_without) {
    for (const auto& setup : without_room())
        for (const auto& [kind, root] : kWhat) {
            Sharing blocks(4, kind, 700, root, setup);
            for (int salt : {0, 1}) {
                for (int slot : blocks.all) blocks.enter(slot, salt);
                blocks.rig.go_on(blocks.all);
                for (int slot : blocks.all) EXPECT(blocks.has_all(slot, salt));
            }
            EXPECT(blocks.goes_on_without(setup, "run.blocks"));
        }
}

// Wherever one of five dies: all of those who are left have what the outcome says, and the same, or all have an error.
FT_TEST(death_among_windows_of_blocks_is_the_same_for_all) {
    int survived = 0, failed = 0;
    for (const auto& [kind, root] : kWhat)
        for (int dying : {0, 2, 4})
            for (int pieces = 0; pieces < 40; pieces += 3) {
                Sharing blocks(5, kind, 300, root);
                auto& rig = blocks.rig;
                for (int slot : blocks.all) blocks.enter(slot);
                std::vector<int> left;
                for (int slot : blocks.all)
                    if (slot != dying) left.push_back(slot);
                for (int i = 0; i < pieces; ++i) {
                    rig.go_on(left);
                    if (!rig.work(dying)) break;
                }
                rig.kill(dying);
                for (int slot : left) rig.evidence(slot, dying, Evidence::Pidfd);
                rig.go_on(left);
                for (int slot : left) {
                    const auto& r = *blocks.request(slot);
                    REQUIRE(r.done);
                    EXPECT_EQ(static_cast<int>(r.status.code), static_cast<int>(blocks.request(left[0])->status.code));
                    if (!r.status.ok()) {
                        EXPECT(r.status.code == Code::PeerFailure && dying == (kind == OpKind::Broadcast ? root : dying));
                        ++failed;
                        continue;
                    }
                    ++survived;
                    EXPECT(blocks.of(slot) == blocks.of(left[0]));
                    for (std::size_t b = 0; b < blocks.blocks(); ++b) EXPECT(blocks.has(slot, b));
                }
            }
    EXPECT(survived > 200 && failed > 50);
}

// C9: it was stopped while it copied out of a window, and those who have gone on without it have something else there. No block of which it
// says that it has it is of a later operation.
FT_TEST(rank_that_was_stopped_takes_no_later_block_out_of_a_window) {
    constexpr int kStopped = 1;
    const std::vector<int> others{0, 2, 3, 4};
    int over = 0;
    for (const auto& [kind, root] : kWhat)
        for (int pieces = 0; pieces < 60; ++pieces) {
            Sharing blocks(5, kind, 300, root);
            auto& rig = blocks.rig;
            for (int slot : blocks.all) blocks.enter(slot);
            for (int i = 0; i < pieces; ++i) {
                rig.go_on(others);
                if (!rig.work(kStopped)) break;
            }
            if (blocks.request(kStopped)->done) break;
            for (int slot : others) {
                rig.hold(slot, kStopped);
                rig.hold(kStopped, slot);
                rig.evidence(slot, kStopped, Evidence::Pidfd);
            }
            rig.go_on(others);
            for (int slot : others) {
                REQUIRE(blocks.request(slot)->done);
                blocks.enter(slot, 1);
            }
            rig.go_on(others);
            const auto before = blocks.of(kStopped);
            while (rig.work(kStopped)) {}
            over += blocks.of(kStopped) != before;  // it has copied it, and does not count it
            for (int slot : others) {
                rig.hold(slot, kStopped, false);
                rig.hold(kStopped, slot, false);
            }
            rig.settle();
            EXPECT(blocks.request(kStopped)->done && !blocks.request(kStopped)->status.ok());
        }
    EXPECT(over > 10);
}

// C9, of those who are voted on: a rank that has left the attempt puts another communicator's block into the window, out of which another one
// still copies.
FT_TEST(nothing_that_another_communicator_has_put_into_a_window_is_a_block) {
    RunsAhead schedule;
    for (const auto kind : {OpKind::Broadcast, OpKind::AllGather})
        for (int pieces = 0; pieces < 40; ++pieces) {
            Sharing blocks(5, kind, 300, RunsAhead::kAhead);
            for (int slot : blocks.all) blocks.enter(slot);
            std::vector<std::int32_t> more(blocks.count, 123456789);
            if (!schedule.run(blocks.rig, blocks.requests, pieces, OpKind::Broadcast, more)) break;
            for (int slot : schedule.left) {
                REQUIRE(blocks.request(slot)->done);
                for (const auto& chunk : blocks.request(slot)->outcome.chunks)
                    for (auto at = chunk.offset; at < chunk.offset + chunk.count; ++at)
                        EXPECT(chunk.contributors.empty() ||
                               blocks.of(slot)[at] == Sharing::value(chunk.contributors.list()[0], at % blocks.count, 0));
            }
        }
    EXPECT(schedule.reused > 5);
}

// Each names the next one as the root: nobody has anything to show, and all wait for another; whether they know of each other's boards or not.
FT_TEST(ranks_that_name_each_other_as_the_root_notice) {
    for (bool met : {false, true}) {
        Sharing blocks(4, OpKind::Broadcast, 700);
        if (met) blocks.meet();
        for (int slot : blocks.all) {
            blocks.root = (slot + 1) % 4;
            blocks.enter(slot);
        }
        blocks.rig.go_on(blocks.all);
        for (int slot : blocks.all) EXPECT(blocks.request(slot)->done && blocks.request(slot)->status.code == Code::Mismatch);
    }
}

// Two of four each take themselves for the root, and wait for nobody.
FT_TEST(two_roots_notice_before_anybody_returns) {
    for (bool met : {false, true})
        for (int with_first : {0, 1, 2}) {
            Sharing blocks(4, OpKind::Broadcast, 700);
            if (met) blocks.meet();
            for (int slot : blocks.all) {
                blocks.root = slot <= with_first ? 0 : 3;
                blocks.enter(slot);
            }
            blocks.rig.go_on(blocks.all);
            for (int slot : blocks.all) EXPECT(blocks.request(slot)->done && blocks.request(slot)->status.code == Code::Mismatch);
        }
}

// A small sum of one rank, where the others share blocks.
FT_TEST(who_calls_something_small_among_windows_is_noticed) {
    for (const auto& [kind, root] : kWhat)
        for (int odd : {0, 1, 3, 4, 5, 7}) {
            Sharing blocks(4, kind, 700, root);
            if (odd >= 4) blocks.meet();
            odd %= 4;
            std::int64_t one = 1;
            const auto sum = blocks.rig.sum(odd, one);
            for (int slot : blocks.all)
                if (slot != odd) blocks.enter(slot);
            blocks.rig.go_on(blocks.all);
            EXPECT(sum->done && sum->status.code == Code::Mismatch);
            for (int slot : blocks.all)
                if (slot != odd) EXPECT(blocks.request(slot)->done && blocks.request(slot)->status.code == Code::Mismatch);
        }
}

// What says nothing to anybody is noticed as well, if the others know each other's boards once they have waited for long: who waits for a small
// block, or is the root of a small sum.
FT_TEST(who_waits_for_something_small_among_windows_is_noticed) {
    for (const auto& [kind, root] : kWhat)
        for (const auto small : {OpKind::Broadcast, OpKind::Reduce})
            for (bool met : {false, true})
                for (int odd : {1, 3}) {
                    Sharing blocks(4, kind, 700, root);
                    if (met) blocks.meet();
                    std::int32_t one = 1;
                    OpDesc d;
                    d.kind = small;
                    d.dtype = DType::Int32;
                    d.root = small == OpKind::Reduce ? odd : 0;
                    d.count = 1;
                    d.send = d.recv = &one;
                    const auto other = blocks.rig.node(odd).collective(blocks.rig.now(), Rig::kComm, d);
                    for (int slot : blocks.all)
                        if (slot != odd) blocks.enter(slot);
                    blocks.rig.go_on(blocks.all);
                    for (int tick = 0; tick < 3; ++tick) {
                        for (int slot : blocks.all) blocks.rig.tick(slot);
                        blocks.rig.go_on(blocks.all);
                    }
                    EXPECT(other->done && other->status.code == Code::Mismatch);
                    for (int slot : blocks.all)
                        if (slot != odd)
                            EXPECT(blocks.request(slot)->done && blocks.request(slot)->status.code == Code::Mismatch);
                }
}

// The last one may be stopped while it tells the others.
FT_TEST(who_waits_for_long_looks_again) {
    for (int slow : {0, 3}) {
        Sharing blocks(4, OpKind::AllGather, 60);
        blocks.meet();
        for (int slot : blocks.all)
            if (slot != slow) blocks.enter(slot);
        blocks.rig.go_on(blocks.all);
        for (int slot : blocks.all)
            if (slot != slow) blocks.rig.hold(slow, slot);
        blocks.enter(slow);
        for (int step = 0; step < 8; ++step) {
            blocks.rig.go_on(blocks.all);
            for (int tick = 0; tick < 2; ++tick)
                for (int slot : blocks.all) blocks.rig.tick(slot);
        }
        blocks.rig.go_on(blocks.all);
        for (int slot : blocks.all) EXPECT(blocks.has_all(slot));
    }
}

// A communicator that is closed leaves its board to the next one.
FT_TEST(boards_are_used_again) {
    Sharing blocks(4, OpKind::Broadcast, 700);
    blocks.meet();
    std::size_t windows = 0;
    for (CommId id = 100; id < 140; ++id) {
        blocks.rig.comm(blocks.all, id);
        blocks.comm = id;
        blocks.meet();
        for (int slot : blocks.all) blocks.rig.node(slot).close_comm(blocks.rig.now(), id);
        blocks.rig.settle();
        for (int tick = 0; tick < 3; ++tick)
            for (int slot : blocks.all) blocks.rig.tick(slot);
        if (id == 102) windows = blocks.rig.windows();
    }
    EXPECT_EQ(blocks.rig.windows(), windows);
    EXPECT(!blocks.rig.node(0).lacks_windows());
}

namespace {

// To each a part of `count` numbers; with counts, which say the same, for the ranks in `counted`.
struct SwapInWindows : Windowed {
    std::size_t count;
    std::vector<std::vector<std::int32_t>> in, out;

    SwapInWindows(int ranks, std::size_t count_in, Rig::Setup setup = with_windows())
        : Windowed(ranks, setup), count(count_in), in(all.size()), out(all.size()) {}
    static std::int32_t value(int from, int to, std::size_t i, int salt) {
        return from * 100000 + to * 1000 + static_cast<std::int32_t>(i % 997) + salt * 10000000;
    }
    void enter(int slot, int salt = 0, bool counted = false) {
        const auto s = static_cast<std::size_t>(slot);
        in[s].resize(count * all.size());
        out[s].assign(in[s].size(), -1);
        for (int to : all)
            for (std::size_t i = 0; i < count; ++i) in[s][static_cast<std::size_t>(to) * count + i] = value(slot, to, i, salt);
        OpDesc d;
        d.kind = OpKind::AllToAll;
        d.dtype = DType::Int32;
        d.count = counted ? 0 : count;
        d.send = in[s].data();
        d.recv = out[s].data();
        if (counted) {
            PerRank per;
            per.send_counts.assign(all.size(), count);
            per.recv_counts = per.send_counts;
            d.layout = std::make_shared<const PerRank>(std::move(per));
        }
        requests[s] = rig.node(slot).collective(rig.now(), Rig::kComm, d);
    }
    bool has_all(int slot, int salt = 0) const {
        const auto s = static_cast<std::size_t>(slot);
        bool yes = requests[s]->done && requests[s]->status.ok();
        for (int from : all)
            for (std::size_t i = 0; i < count; ++i)
                yes &= out[s][static_cast<std::size_t>(from) * count + i] == value(from, slot, i, salt);
        return yes;
    }
};

}  // namespace

FT_TEST(ranks_that_share_processors_exchange_parts_in_windows) {
    for (int ranks : {4, 7, 16})
        for (std::size_t count : {17, 40, 700}) {
            SwapInWindows parts(ranks, count);
            for (int salt : {0, 1, 2}) {  // in the same windows
                for (int slot : parts.all) parts.enter(slot, salt);
                parts.rig.go_on(parts.all);
                for (int slot : parts.all) EXPECT(parts.has_all(slot, salt));
            }
            EXPECT(parts.rig.traced(0, "run.exchange") && !parts.rig.traced(0, "run.direct"));
        }
}

// Some give counts, and some don't: then all parts go from rank to rank.
FT_TEST(who_gives_counts_exchanges_with_who_does_not) {
    for (int counted : {1, 3, 7}) {
        SwapInWindows parts(4, 200);
        for (int slot : parts.all) parts.enter(slot, 0, (counted >> slot & 1) != 0);
        parts.rig.go_on(parts.all);
        for (int slot : parts.all) EXPECT(parts.has_all(slot));
        EXPECT(parts.rig.traced(3, "exchange.direct") && parts.rig.traced(3, "run.direct"));
        for (int slot : parts.all) parts.enter(slot, 1);  // and the next time in windows
        parts.rig.go_on(parts.all);
        for (int slot : parts.all) EXPECT(parts.has_all(slot, 1));
    }
}

FT_TEST(without_room_for_windows_parts_go_from_rank_to_rank) {
    for (const auto& setup : without_room()) {
        SwapInWindows parts(4, 200, setup);
        for (int salt : {0, 1}) {
            for (int slot : parts.all) parts.enter(slot, salt);
            parts.rig.go_on(parts.all);
            for (int slot : parts.all) EXPECT(parts.has_all(slot, salt));
        }
        EXPECT(parts.rig.traced(0, "run.exchange") && parts.rig.traced(0, "run.direct") && parts.rig.node(0).lacks_windows());
    }
}

// Wherever one of four dies: the others have their parts, or all have an error.
FT_TEST(death_among_windows_of_parts_is_the_same_for_all) {
    int survived = 0, failed = 0;
    for (int dying : {0, 2})
        for (int pieces = 0; pieces < 60; ++pieces) {
            SwapInWindows parts(4, 60);
            auto& rig = parts.rig;
            for (int slot : parts.all) parts.enter(slot);
            std::vector<int> left;
            for (int slot : parts.all)
                if (slot != dying) left.push_back(slot);
            for (int i = 0; i < pieces; ++i) {
                rig.go_on(left);
                if (!rig.work(dying)) break;
            }
            const bool over = parts.requests[static_cast<std::size_t>(dying)]->done;
            rig.kill(dying);
            for (int slot : left) rig.evidence(slot, dying, Evidence::Pidfd);
            rig.go_on(left);
            for (int slot : left) {
                const auto& r = *parts.requests[static_cast<std::size_t>(slot)];
                REQUIRE(r.done);
                EXPECT_EQ(static_cast<int>(r.status.code),
                          static_cast<int>(parts.requests[static_cast<std::size_t>(left[0])]->status.code));
                EXPECT(r.status.ok() || (r.status.code == Code::PeerFailure && !over));
                if (r.status.ok()) EXPECT(parts.has_all(slot));
                ++(r.status.ok() ? survived : failed);
            }
        }
    EXPECT(survived > 20 && failed > 20);
}

// C9: what was taken out of the window of a rank that has left the attempt, and put another communicator's part there, completes nothing.
FT_TEST(nothing_that_another_communicator_has_put_into_a_window_is_a_part) {
    RunsAhead schedule;
    int ended = 0;
    for (int pieces = 0; pieces < 60; ++pieces) {
        SwapInWindows parts(5, 60);
        for (int slot : parts.all) parts.enter(slot);
        std::vector<std::int32_t> more(600, 123456789);
        if (!schedule.run(parts.rig, parts.requests, pieces, OpKind::Broadcast, more)) break;
        for (int slot : schedule.left) {
            const auto& r = *parts.requests[static_cast<std::size_t>(slot)];
            REQUIRE(r.done);
            if (r.status.ok()) EXPECT(parts.has_all(slot));
            ended += !r.status.ok();
        }
    }
    EXPECT(schedule.reused > 3 && ended > 3);
}

}  // namespace ftcomm::unit
