// The policy replay with log groups: messages inside a group are in no log, and a group starts again as a whole.
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

Rig::Setup in_groups(std::vector<std::int32_t> groups, bool one_host = true) {
    Rig::Setup s;
    s.replay = true;
    s.one_host = one_host;
    s.groups = std::move(groups);
    return s;
}
const std::vector<int> kFour = {0, 1, 2, 3};
const std::vector<std::int32_t> kPairs = {0, 0, 1, 1};

RequestPtr send(Rig& rig, int src, const std::int64_t& what, int dst, std::int64_t tag = 3) {
    return rig.node(src).send(rig.now(), Rig::kComm, &what, sizeof what, dst, tag);
}
RequestPtr receive(Rig& rig, int dst, std::int64_t& what, int src, std::int64_t tag = 3) {
    return rig.node(dst).recv(rig.now(), Rig::kComm, &what, sizeof what, src, tag);
}
std::uint64_t logged(Rig& rig, int src, int dst) {
    MemoryLog log(rig.log(src), src, [](int) { return true; });
    return log.last({Rig::kComm, src, dst});
}
// The group of `dead`, but for itself, is told to go, and is ended.
void end_group(Rig& rig, int dead, const std::vector<int>& others, int observer) {
    rig.kill(dead);
    rig.evidence(observer, dead, Evidence::Pidfd);
    rig.settle();
    for (int s : others) {
        EXPECT(rig.node(s).stale());
        EXPECT(rig.removed(observer, s, Evidence::Group));
        rig.kill(s);
    }
}
void back(Rig& rig, int slot, const std::vector<int>& slots = kFour) {
    rig.restart(slot);
    rig.settle();
    rig.join_comm(slot, slots, Rig::kComm, Policy::Replay);
}

}  // namespace

FT_TEST(group_messages_inside_are_in_no_log) {
    for (bool one_host : {true, false}) {
        Rig rig(4, in_groups(kPairs, one_host));
        rig.comm(kFour, Rig::kComm, Policy::Replay);
        const std::int64_t out = 5;
        std::int64_t in = 0;
        for (int dst : {1, 2}) {
            const auto sent = send(rig, 0, out, dst);
            const auto got = receive(rig, dst, in, 0);
            rig.settle();
            EXPECT(sent->done && sent->status.ok() && got->done && in == 5);
            in = 0;
        }
        EXPECT_EQ(logged(rig, 0, 1), 0u);
        EXPECT_EQ(logged(rig, 0, 2), 1u);
        // Large: not done before the receiver has it.
        const std::vector<std::int64_t> large(100, 7);
        std::vector<std::int64_t> room(100);
        const auto sent = rig.node(2).send(rig.now(), Rig::kComm, large.data(), 800, 3, 1);
        rig.settle();
        EXPECT(!sent->done);
        const auto got = rig.node(3).recv(rig.now(), Rig::kComm, room.data(), 800, 2, 1);
        rig.settle();
        EXPECT(sent->done && got->done && room == large);
        EXPECT_EQ(logged(rig, 2, 3), 0u);
    }
}

FT_TEST(group_starts_again_as_a_whole_and_the_others_stay) {
    for (bool one_host : {true, false})
        for (int dead : {0, 1}) {
            Rig rig(4, in_groups(kPairs, one_host));
            rig.comm(kFour, Rig::kComm, Policy::Replay);
            // 3 tells 0, 0 tells 1, 1 tells 2.
            const auto first_part = [&](std::int64_t a) {
                std::int64_t b = 0, c = 0;
                const auto r0 = receive(rig, 0, b, 3);
                rig.settle();
                EXPECT(r0->done && b == a);
                send(rig, 0, b, 1);
                const auto r1 = receive(rig, 1, c, 0);
                rig.settle();
                EXPECT(r1->done && c == a);
                const auto sent = send(rig, 1, c, 2);
                EXPECT(sent->done && sent->status.ok());
            };
            std::int64_t got = 0;
            send(rig, 3, 11, 0);
            first_part(11);
            const auto last = receive(rig, 2, got, 1);
            rig.settle();
            EXPECT(last->done && got == 11);
            end_group(rig, dead, {1 - dead}, 2);
            EXPECT(!rig.node(2).stale() && !rig.node(3).stale());
            back(rig, 0);
            back(rig, 1);
            first_part(11);  // 3's message comes out of its log; 2 hears nothing twice
            std::int64_t next = 0;
            const auto more = receive(rig, 2, next, 1);
            rig.settle();
            EXPECT(!more->done);
            send(rig, 1, 12, 2);
            rig.settle();
            EXPECT(more->done && next == 12);
        }
}

// Whoever is back first must not speak to the process that is still to go, and must lose nothing.
FT_TEST(group_messages_wait_until_the_receiver_is_back) {
    Rig rig(4, in_groups(kPairs));
    rig.comm(kFour, Rig::kComm, Policy::Replay);
    rig.hold(2, 1);  // slot 1 does not hear of it: it lives on
    rig.hold(3, 1);
    rig.hold(0, 1);
    rig.kill(0);
    rig.evidence(2, 0, Evidence::Pidfd);
    rig.settle();
    EXPECT(rig.removed(2, 1, Evidence::Group));
    EXPECT(!rig.node(1).stale());
    rig.restart(0);
    rig.join_comm(0, kFour, Rig::kComm, Policy::Replay);
    const std::int64_t small = 21;
    const std::vector<std::int64_t> large(100, 22);
    std::int64_t old = 0, fresh = 0;
    const auto stale = receive(rig, 1, old, 0);
    const auto before = send(rig, 0, small, 1);  // not in yet
    rig.settle();
    const auto behind = rig.node(0).send(rig.now(), Rig::kComm, large.data(), 800, 1, 3);
    rig.settle();
    EXPECT(!before->done && !behind->done);
    for (int s : {0, 2, 3}) rig.hold(s, 1, false);
    rig.settle();
    EXPECT(rig.node(1).stale() && stale->done && old == 0);
    rig.kill(1);
    back(rig, 1);
    const auto got = receive(rig, 1, fresh, 0);
    std::vector<std::int64_t> room(100);
    const auto got_large = rig.node(1).recv(rig.now(), Rig::kComm, room.data(), 800, 0, 3);
    rig.settle();
    EXPECT(before->done && behind->done && got->done && got_large->done);
    EXPECT(fresh == 21 && room == large);
}

FT_TEST(group_receives_from_any_get_the_same_again) {
    Rig rig(4, in_groups(kPairs));
    rig.comm(kFour, Rig::kComm, Policy::Replay);
    const auto receive_two = [&](std::int64_t* in) {
        const auto a = receive(rig, 0, in[0], kAny), b = receive(rig, 0, in[1], kAny);
        rig.settle();
        EXPECT(a->done && b->done);
        return std::vector<int>{a->source, b->source};
    };
    std::int64_t in[2] = {};
    send(rig, 2, 32, 0);  // from another group, and first
    rig.settle();
    send(rig, 1, 31, 0);  // from its own
    const auto sources = receive_two(in);
    EXPECT(sources == (std::vector<int>{1, 2}) || sources == (std::vector<int>{2, 1}));
    const std::int64_t first[2] = {in[0], in[1]};
    end_group(rig, 1, {0}, 2);
    back(rig, 0);
    back(rig, 1);
    const auto a = receive(rig, 0, in[0], kAny), b = receive(rig, 0, in[1], kAny);
    rig.settle();
    send(rig, 1, 31, 0);
    rig.settle();
    REQUIRE(a->done && b->done);
    EXPECT((std::vector<int>{a->source, b->source}) == sources);
    EXPECT(in[0] == first[0] && in[1] == first[1]);
}

// One of a group has written the mark, the other has not: both go on from the one before. One whose newest is damaged takes the others back.
FT_TEST(group_goes_on_from_one_checkpoint) {
    for (bool damaged : {false, true}) {
        Rig rig(4, in_groups(kPairs));
        rig.comm(kFour, Rig::kComm, Policy::Replay);
        const auto all = [&](auto&& what) {
            std::vector<RequestPtr> r;
            for (int s : kFour) r.push_back(what(s));
            rig.settle();
            for (auto& one : r) EXPECT(one->done && one->status.ok());
        };
        const auto commit = [&](int s, const char* tag) { return rig.node(s).comm_commit(rig.now(), Rig::kComm, tag); };
        all([&](int s) { return rig.node(s).comm_resume(rig.now(), Rig::kComm, ""); });
        all([&](int s) { return commit(s, "1"); });
        const auto step = [&] {
            std::int64_t in = 0;
            send(rig, 0, 41, 1);
            const auto got = receive(rig, 1, in, 0);
            rig.settle();
            EXPECT(got->done && in == 41);
        };
        step();
        if (damaged) {
            all([&](int s) { return commit(s, "2"); });
        } else {
            std::vector<RequestPtr> r;
            for (int from : kFour) rig.hold(from, 1);
            for (int s : kFour) r.push_back(commit(s, "2"));
            rig.settle();
            if (r[0]->done) EXPECT(rig.node(0).comm_checkpoints(Rig::kComm).front() == "2");
            for (int from : kFour) rig.hold(from, 1, false);
        }
        end_group(rig, 1, {0}, 2);
        back(rig, 0);
        back(rig, 1);
        rig.settle();
        // Each loads the newest that it has; for slot 1 that is the older one.
        const auto newest = rig.node(0).comm_checkpoints(Rig::kComm).front();
        auto zero = rig.node(0).comm_resume(rig.now(), Rig::kComm, newest);
        rig.settle();
        EXPECT(!zero->done);
        const auto one = rig.node(1).comm_resume(rig.now(), Rig::kComm, "1");
        rig.settle();
        if (newest == "2") {
            REQUIRE(zero->done);
            EXPECT(zero->status.code == Code::Mismatch);
            EXPECT(!one->done);
            EXPECT(rig.node(0).comm_checkpoints(Rig::kComm) == std::vector<std::string>{"1"});
            zero = rig.node(0).comm_resume(rig.now(), Rig::kComm, "1");
            rig.settle();
        }
        REQUIRE(zero->done && one->done);
        EXPECT(zero->status.ok() && one->status.ok());
        step();
    }
}

}  // namespace ftcomm::unit
