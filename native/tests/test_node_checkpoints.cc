// Checkpoints under the policy replay: what goes with them, and what one rank's full log does to all.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

// Two ranks, each on a host of its own.
struct Pair {
    Rig rig{2, Rig::replaying(false)};
    Pair() { rig.comm({0, 1}, Rig::kComm, Policy::Replay); }

    void all_mark(const std::string& tag, bool commits) {
        for (const auto& one : rig.mark_all(tag, commits)) EXPECT(one->status.ok());
    }
    void nobody_marks(const std::string& tag, bool commits) {
        for (const auto& one : rig.mark_all(tag, commits)) {
            EXPECT_EQ(one->status.code, Code::LogFull);
            EXPECT(one->status.message.find("ranks [0]") != std::string::npos);
        }
    }
    Status mark_again(int slot, const std::string& tag, bool commits) {
        const auto request = rig.mark(slot, tag, commits);
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
    // Room for the result of the agreement, and not for the mark behind it.
    void leave_little() { rig.log(0).limit = rig.log(0).bytes + 185; }
    void leave_much() { rig.log(0).limit = ~std::uint64_t{0}; }
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

// One rank has no room for its mark: if the others wrote theirs, the same number would be of another checkpoint on it from then on.
FT_TEST(checkpoint_that_one_log_has_no_room_for_is_refused_on_all) {
    Pair p;
    p.leave_little();
    p.nobody_marks("", false);
    p.leave_much();
    p.all_mark("", false);
    p.all_mark("0", true);
    p.leave_little();
    p.nobody_marks("1", true);
    p.leave_much();
    p.all_mark("2", true);
    const std::vector<std::string> tags = {"2", "0"};
    for (int r : {0, 1}) EXPECT(p.rig.node(r).comm_checkpoints(Rig::kComm) == tags);
    // Who does it again is told the same.
    for (int r : {0, 1}) {
        p.rig.replace(r, 1 - r, {0, 1});
        EXPECT_EQ(p.mark_again(r, "", false).code, Code::LogFull);
        EXPECT(p.mark_again(r, "0", false).ok());
        EXPECT_EQ(p.mark_again(r, "1", true).code, Code::LogFull);
        EXPECT(p.mark_again(r, "2", true).ok());
    }
    p.all_mark("3", true);
}

// What is late has to be in the log before a mark that counts it, and there is no room for that.
FT_TEST(checkpoint_behind_messages_that_cannot_be_logged_is_refused_on_all) {
    auto setup = Rig::replaying(false);
    setup.log_late = true;
    setup.eager_limit = 4000;
    Rig rig(2, setup);
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    const auto mark = [&](const std::string& tag, bool commits) { return codes(rig.mark_all(tag, commits)); };
    const std::vector<Code> good(2, Code::Ok), full(2, Code::LogFull);
    EXPECT(mark("", false) == good);
    const Bytes out(3000);
    Bytes in(3000);
    rig.node(0).send(rig.now(), Rig::kComm, out.data(), out.size(), 1, 3);
    const auto got = rig.node(1).recv(rig.now(), Rig::kComm, in.data(), in.size(), 0, 3);
    rig.settle();
    REQUIRE(got->done && got->status.ok());
    rig.log(0).limit = rig.log(0).bytes + 2000;
    EXPECT(mark("0", true) == full);
    rig.log(0).limit = ~std::uint64_t{0};
    EXPECT(mark("1", true) == good);
}

}  // namespace ftcomm::unit
