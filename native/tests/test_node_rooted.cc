// Reduces by windows of shared memory, of ranks that share the processors of one host: only the root looks into them.
#include "tests/window_rig.h"

namespace ftcomm::unit {
namespace {

struct Rooted : Windowed {
    std::size_t count;
    bool in_place = false;  // at the root
    std::vector<std::vector<std::int32_t>> in, out;

    explicit Rooted(int ranks, std::size_t count_in = 700, Rig::Setup setup = with_windows())
        : Windowed(ranks, setup), count(count_in), in(all.size()), out(all.size()) {}
    void enter(int slot, int root, int salt = 0) {
        const auto s = static_cast<std::size_t>(slot);
        in[s].resize(count);
        for (std::size_t i = 0; i < count; ++i) in[s][i] = input(slot, i, salt);
        out[s].assign(count, -1);
        OpDesc d;
        d.kind = OpKind::Reduce;
        d.root = root;
        d.dtype = DType::Int32;
        d.count = count;
        d.send = in[s].data();
        if (slot == root) d.recv = in_place ? in[s].data() : out[s].data();
        requests[s] = rig.node(slot).collective(rig.now(), Rig::kComm, d);
    }
    bool ended(int slot, Code code) const {
        const auto& r = *requests[static_cast<std::size_t>(slot)];
        return r.done && r.status.code == code;
    }
    // What the outcome names is what was added, part by part; and nobody's input is lost.
    bool root_has_what_is_said(int root, int salt = 0) const {
        const auto r = static_cast<std::size_t>(root);
        std::size_t right = 0;
        for (const auto& chunk : requests[r]->outcome.chunks)
            for (auto i = chunk.offset; i < chunk.offset + chunk.count; ++i) {
                std::int32_t total = 0;
                for (int from : chunk.contributors.list()) total += input(from, i, salt);
                right += (in_place ? in[r] : out[r])[i] == total;
            }
        for (int slot : all)
            for (std::size_t i = 0; i < count && (slot != root || !in_place); ++i)
                if (in[static_cast<std::size_t>(slot)][i] != input(slot, i, salt)) return false;
        return right == count;
    }
};

}  // namespace

FT_TEST(ranks_that_share_processors_reduce_in_windows) {
    for (int ranks : {3, 4, 7, 16})
        for (std::size_t count : {17, 40, 700, 2047})
            for (int root : {0, 1, ranks - 1}) {
                Rooted sums(ranks, count);
                for (int salt : {0, 1, 2}) {  // in the same windows
                    sums.in_place = salt == 1;
                    for (int slot : sums.all) sums.enter(slot, root, salt);
                    sums.rig.go_on(sums.all);
                    for (int slot : sums.all) EXPECT(sums.ended(slot, Code::Ok));
                    EXPECT(sums.requests[static_cast<std::size_t>(root)]->outcome.contributors == RankSet::of(sums.all));
                    EXPECT(sums.root_has_what_is_said(root, salt));
                }
                EXPECT(sums.rig.traced(0, "run.stage") && !sums.rig.traced(0, "run.ring"));
            }
}

FT_TEST(without_room_for_windows_a_reduce_comes_without) {
    for (const auto& setup : without_room()) {
        Rooted sums(4, 700, setup);
        for (int slot : sums.all) sums.enter(slot, 1);
        sums.rig.go_on(sums.all);
        for (int slot : sums.all) EXPECT(sums.ended(slot, Code::Ok));
        EXPECT(sums.root_has_what_is_said(1) && sums.goes_on_without(setup, "run.stage"));
    }
}

// Wherever one of five dies: without the root all have an error; else it has the sum of those who are left, or of all.
FT_TEST(death_among_windows_of_a_reduce_is_survived_by_the_others) {
    constexpr int kRoot = 1;
    int survived = 0;
    for (bool in_place : {false, true})
        for (int dying : {0, kRoot, 4})
            for (int pieces = 0; pieces < 40; pieces += 3) {
                Rooted sums(5);
                auto& rig = sums.rig;
                sums.in_place = in_place;
                for (int slot : sums.all) sums.enter(slot, kRoot);
                std::vector<int> left;
                for (int slot : sums.all)
                    if (slot != dying) left.push_back(slot);
                for (int i = 0; i < pieces; ++i) {
                    rig.go_on(left);
                    if (!rig.work(dying)) break;
                }
                rig.go_on(left);
                rig.kill(dying);
                for (int slot : left) rig.evidence(slot, dying, Evidence::Pidfd);
                rig.go_on(left);
                const bool ok = sums.ended(left[0], Code::Ok);
                for (int slot : left) EXPECT(sums.ended(slot, ok ? Code::Ok : Code::PeerFailure));
                EXPECT(ok || dying == kRoot);
                if (dying != kRoot) survived += sums.root_has_what_is_said(kRoot);
            }
    EXPECT_EQ(survived, 2 * 2 * 14);
}

// C9: a rank that has left the attempt puts another communicator's input into the window, which the root still adds up.
FT_TEST(root_adds_nothing_that_another_communicators_sum_has_put_into_a_window) {
    RunsAhead schedule;
    for (int pieces = 0; pieces < 30; ++pieces) {
        Rooted sums(5, 1500);
        sums.in_place = pieces % 2 == 0;
        for (int slot : sums.all) sums.enter(slot, RunsAhead::kLate);
        std::vector<std::int32_t> more(sums.count, 123456789);
        if (!schedule.run(sums.rig, sums.requests, pieces, OpKind::AllReduce, more)) break;
        for (int slot : schedule.left) EXPECT(sums.ended(slot, Code::Ok));
        EXPECT(sums.root_has_what_is_said(RunsAhead::kLate));
    }
    EXPECT(schedule.reused > 5);
}

// Who names itself waits for the others, and each tells only one that it is there: whatever three ranks name, somebody notices.
FT_TEST(ranks_that_name_different_roots_of_a_reduce_notice) {
    const std::vector<std::vector<int>> orders{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}};
    for (int roots = 0; roots < 27; ++roots)
        for (bool met : {false, true})  // the boards are known
            for (const auto& order : orders) {
                const int named[] = {roots % 3, roots / 3 % 3, roots / 9};
                const bool same = named[0] == named[1] && named[1] == named[2];
                Rooted sums(3);
                if (met) {
                    for (int slot : sums.all) sums.enter(slot, 1);
                    sums.rig.go_on(sums.all);
                    for (int slot : sums.all) EXPECT(sums.ended(slot, Code::Ok));
                }
                for (int slot : order) sums.enter(slot, named[slot]);
                sums.rig.go_on(sums.all);
                for (int slot : sums.all) EXPECT(sums.ended(slot, same ? Code::Ok : Code::Mismatch));
            }
}

// One names a root that is dead, which fails at once: whoever it is, and whoever is the others' root, it hears of that. (Once the boards are
// known when the others have waited for long.)
FT_TEST(reduce_to_a_dead_root_among_windows_is_noticed) {
    constexpr int kDead = 4;
    for (int root : {0, 1, 3})
        for (int odd : {0, 1, 2, 3, 4, 5, 6, 7}) {
            const bool met = odd >= 4;
            odd %= 4;
            Rooted sums(5);
            auto& rig = sums.rig;
            rig.kill(kDead);
            for (int slot : {0, 1, 2, 3}) rig.evidence(slot, kDead, Evidence::Pidfd);
            rig.settle();
            if (met) {
                for (int slot : {0, 1, 2, 3}) sums.enter(slot, root);
                rig.go_on({0, 1, 2, 3});
                for (int slot : {0, 1, 2, 3}) EXPECT(sums.ended(slot, Code::Ok));
            }
            for (int slot : {0, 1, 2, 3}) sums.enter(slot, slot == odd ? kDead : root);
            EXPECT(sums.ended(odd, Code::PeerFailure));
            rig.go_on({0, 1, 2, 3});
            if (met)
                for (int tick = 0; tick < 3; ++tick)
                    for (int slot : {0, 1, 2, 3}) rig.tick(slot);
            rig.go_on({0, 1, 2, 3});
            for (int slot : {0, 1, 2, 3})
                if (slot != odd) EXPECT(sums.ended(slot, Code::Mismatch));
        }
}

}  // namespace ftcomm::unit
