// Checkpoints under the policy replay: what goes with them.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

// Two ranks, each on a host of its own.
struct Pair {
    Rig rig{2, Rig::replaying(false)};
    Pair() { rig.comm({0, 1}, Rig::kComm, Policy::Replay); }

    std::vector<RequestPtr> mark(const std::string& tag, bool commits) {
        std::vector<RequestPtr> all;
        for (int r : {0, 1}) all.push_back(mark_one(r, tag, commits));
        rig.settle();
        for (const auto& one : all) REQUIRE(one->done);
        return all;
    }
    RequestPtr mark_one(int slot, const std::string& tag, bool commits) {
        return commits ? rig.node(slot).comm_commit(rig.now(), Rig::kComm, tag)
                       : rig.node(slot).comm_resume(rig.now(), Rig::kComm, tag);
    }
    void all_mark(const std::string& tag, bool commits) {
        for (const auto& one : mark(tag, commits)) EXPECT(one->status.ok());
    }
    Status mark_again(int slot, const std::string& tag, bool commits) {
        const auto request = mark_one(slot, tag, commits);
        rig.settle();
        REQUIRE(request->done);
        return request->status;
    }
    void send(std::int64_t value) { rig.node(0).send(rig.now(), Rig::kComm, &value, sizeof value, 1, 3); }
    std::int64_t answered() {
        std::int64_t value = 0;
        const auto request = rig.node(1).recv(rig.now(), Rig::kComm, &value, sizeof value, -1, 3);
        rig.settle();
        REQUIRE(request->done && request->status.ok());
        return value;
    }
};

}  // namespace

// Which source ANY got is needed as long as a checkpoint that comes before it.
FT_TEST(checkpoint_gives_up_answers_that_nobody_asks_for) {
    Pair p;
    const auto step = [&](std::int64_t value) {
        p.send(value);
        EXPECT_EQ(p.answered(), value);
    };
    step(100);
    p.all_mark("", false);
    for (int c = 0; c < 5; ++c) {
        step(c);
        p.all_mark(std::to_string(c), true);
    }
    const LogKey answers{Rig::kComm, 1, kAnswers};
    auto later = answers;
    later.part = 1;
    EXPECT_EQ(p.rig.log(1).collected[later], 3u);
    EXPECT_EQ(p.rig.log(1).collected[answers], 0u);  // every process asks for it again
    // The oldest that is kept is as good as it was.
    p.rig.replace(1, 0, {0, 1});
    EXPECT_EQ(p.answered(), 100);
    EXPECT(p.mark_again(1, "2", false).ok());
    for (int c : {3, 4}) {
        EXPECT_EQ(p.answered(), c);
        EXPECT(p.mark_again(1, std::to_string(c), true).ok());
    }
    step(9);
    p.all_mark("9", true);
}

}  // namespace ftcomm::unit
