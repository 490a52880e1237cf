// A replacement that starts without its predecessor's log, on a host of its own: the others have its messages and results, or it says what
// nobody has.
#include "tests/restore_rig.h"

namespace ftcomm::unit {

FT_TEST(restore_feeds_a_replacement_without_a_log_from_the_others) {
    for (int victim : {0, 1, 2}) {
        Apart a;
        const int next = (victim + 1) % 3;
        a.send(victim, next, 5);
        a.send(next, victim, 6);
        EXPECT_EQ(a.received(next, victim), 5);
        EXPECT_EQ(a.received(victim, next), 6);
        a.sums(7);
        a.send(victim, next, 8);
        a.rig.settle();
        a.sums(1);
        const auto before = a.contents(victim);
        const auto ready = a.lost(victim);
        REQUIRE(ready->done && ready->status.ok());
        EXPECT(a.contents(victim) == before);
        // The program again: nothing of it arrives twice.
        EXPECT(a.send(victim, next, 5)->status.ok());
        EXPECT_EQ(a.received(victim, next), 6);
        for (std::int64_t each : {7, 1}) {
            if (each == 1) EXPECT(a.send(victim, next, 8)->status.ok());
            std::int64_t value = each;
            const auto sum = a.rig.sum(victim, value);
            a.rig.settle();
            EXPECT(sum->done && value == 3 * each);
        }
        EXPECT_EQ(a.received(next, victim), 8);
        a.send(victim, next, 9);
        EXPECT_EQ(a.received(next, victim), 9);
        a.sums(4);
        // It is a rank like any other now: it dies once more, with its log.
        a.kill(victim);
        const auto third = a.restart(victim);
        a.rig.settle();
        REQUIRE(third->done && third->status.ok());
        EXPECT(a.send(victim, next, 5)->status.ok());
        EXPECT_EQ(a.received(victim, next), 6);
    }
}

FT_TEST(restore_compares_what_is_sent_again_with_what_has_arrived) {
    Apart a;
    a.send(1, 2, 5);
    a.rig.settle();
    REQUIRE(a.lost(1)->done);
    EXPECT_EQ(a.send(1, 2, 6)->status.code, Code::ReplayDiverged);
}

// The new log is filled record by record: who dies in it, or who dies while it is asked, is asked again from there.
FT_TEST(restore_goes_on_where_a_process_has_died_in_it) {
    for (int second : {1, 0, 2}) {
        Apart a;
        const Bytes large(1u << 20, std::byte{7});
        Bytes got(large.size());
        for (int i = 0; i < 3; ++i) {
            a.rig.node(1).send(a.rig.now(), Rig::kComm, large.data(), large.size(), 2, 3);
            const auto r = a.rig.node(2).recv(a.rig.now(), Rig::kComm, got.data(), got.size(), 1, 3);
            a.rig.settle();
            EXPECT(r->done && got == large);
            a.send(0, 1, i);
            EXPECT_EQ(a.received(1, 0), i);
        }
        a.sums(7);
        const auto before = a.contents(1);
        a.kill(1);
        a.rig.lose_log(1);
        a.rig.hold(2, 1);
        auto ready = a.restart(1);
        for (int i = 0; i < 400; ++i) {
            a.rig.deliver(2, 1);
            a.rig.deliver_all(1, 2);
        }
        const LogKey sent{Rig::kComm, 1, 2};
        EXPECT_EQ(a.rig.log(1).streams[sent].size(), 1u);
        EXPECT(!ready->done);
        a.kill(second);
        a.rig.hold(2, 1, false);
        const auto other = a.restart(second);
        if (second == 1) ready = other;
        a.rig.settle();
        REQUIRE(ready->done && ready->status.ok());
        EXPECT(a.contents(1) == before);
        EXPECT_EQ(a.rig.log(1).streams[sent].size(), 3u);
    }
}

// What nobody has returned from is done again; what somebody has returned from is in that rank's log.
FT_TEST(restore_takes_part_in_what_was_not_complete) {
    Apart a;
    a.sums(1);
    std::int64_t mine[3] = {10, 20, 40};
    const auto first = a.rig.sum(0, mine[0]), third = a.rig.sum(2, mine[2]);
    a.rig.settle();
    REQUIRE(a.lost(1)->done);
    std::int64_t again = 1;
    a.rig.sum(1, again);
    a.rig.settle();
    EXPECT_EQ(again, 3);
    a.rig.sum(1, mine[1]);
    a.rig.settle();
    EXPECT(first->done && third->done);
    for (auto v : mine) EXPECT_EQ(v, 70);
}

FT_TEST(restore_refuses_what_only_the_lost_log_had) {
    {
        Apart a;
        a.send(0, 1, 5);
        EXPECT_EQ(a.received(1, -1), 5);
        EXPECT(has(a.refused(a.lost(1)), "received from ANY"));
    }
    {
        Apart a;
        std::int64_t in[3] = {1, 2, 3}, out[3] = {};
        const auto post = [&](int s) {
            OpDesc d;
            d.kind = OpKind::ReduceScatter;
            d.dtype = DType::Int64;
            d.op = ReduceOp::Sum;
            d.count = 1;
            d.algorithm = Algorithm::Ring;  // a small sum all would have
            d.send = in;
            d.recv = &out[s];
            return a.rig.node(s).collective(a.rig.now(), Rig::kComm, d);
        };
        for (int s : kThree) post(s);
        a.rig.settle();
        EXPECT_EQ(out[1], 6);
        EXPECT(has(a.refused(a.lost(1)), "operation #1, reduce_scatter"));
    }
    {
        Apart a;
        a.send(0, 1, 5);
        a.kill(0);
        a.kill(1);
        a.rig.lose_log(0);
        a.rig.lose_log(1);
        const auto zero = a.restart(0), one = a.restart(1);
        a.rig.advance(2 * Rig::kHeartbeat);
        a.rig.settle();
        EXPECT(has(a.refused(zero), "has lost its log, too"));
        EXPECT(has(a.refused(one), "has lost its log, too"));
    }
}

// Roots of a large reduce have what others do not; the others' records say that there was nothing for them. A small sum all have.
FT_TEST(restore_knows_which_rank_a_result_was_for) {
    for (auto algorithm : {Algorithm::Auto, Algorithm::Ring})
        for (int victim : {0, 1}) {
            Apart a;
            std::int64_t in[3] = {1, 2, 4}, out[3] = {};
            const auto post = [&](int s) {
                OpDesc d;
                d.kind = OpKind::Reduce;
                d.dtype = DType::Int64;
                d.op = ReduceOp::Sum;
                d.count = 1;
                d.root = 0;
                d.algorithm = algorithm;
                d.send = &in[s];
                d.recv = s == 0 ? &out[s] : nullptr;
                return a.rig.node(s).collective(a.rig.now(), Rig::kComm, d);
            };
            for (int s : kThree) post(s);
            a.rig.settle();
            EXPECT_EQ(out[0], 7);
            const auto ready = a.lost(victim);
            if (victim == 0 && algorithm == Algorithm::Ring) {
                EXPECT(has(a.refused(ready), "only this rank was given"));
                continue;
            }
            REQUIRE(ready->done && ready->status.ok());
            out[victim] = 0;
            const auto again = post(victim);
            a.rig.settle();
            EXPECT(again->done && again->status.ok());
            EXPECT_EQ(out[0], 7);
            EXPECT_EQ(out[1], 0);
            a.sums(2);
        }
}

// The first log is still where the rank began; the rank has gone on elsewhere since.
FT_TEST(restore_older_log_of_a_rank_that_has_moved_is_refused) {
    for (int victim : {0, 1}) {
        Apart a;
        const int next = victim + 1;
        a.send(victim, next, 5);
        EXPECT_EQ(a.received(next, victim), 5);
        a.sums(1);
        const auto first = a.rig.log(victim);
        // A replacement that starts elsewhere and gets nowhere changes nothing.
        a.kill(victim);
        a.rig.lose_log(victim);
        a.rig.hold(2, victim);
        a.restart(victim);
        a.kill(victim);
        a.rig.hold(2, victim, false);
        a.rig.log(victim) = first;
        auto ready = a.restart(victim);
        a.rig.settle();
        REQUIRE(ready->done && ready->status.ok());
        a.send(victim, next, 5);
        a.rig.settle();
        // One that gets its log back does.
        ready = a.lost(victim);
        REQUIRE(ready->done && ready->status.ok());
        EXPECT(a.send(victim, next, 5)->status.ok());
        std::int64_t value = 1;
        a.rig.sum(victim, value);
        a.send(victim, next, 6);
        a.rig.settle();
        a.kill(victim);
        a.rig.log(victim) = first;
        a.rig.hold(2, 0);  // the decision has to wait
        a.restart(victim);
        std::int64_t again = 1;
        for (std::int64_t value : {5, 7, 8}) a.send(victim, next, value);  // another history: it does not arrive
        const auto sum = a.rig.sum(victim, again);
        a.rig.settle();
        EXPECT(!sum->done);
        const LogKey arrived{Rig::kComm, victim, next};
        EXPECT_EQ(a.rig.log(next).streams[arrived].size(), 2u);
        a.rig.hold(2, 0, false);
        a.rig.settle();
        REQUIRE(sum->done);
        EXPECT_EQ(sum->status.code, Code::LogCorrupt);
        EXPECT(has(sum->status.message, "is an older one"));
        EXPECT_EQ(a.received(next, victim), 6);
    }
}

namespace {

// Ranks 1 and 2 have lost their logs, one after the other; each is where the others are.
struct OneByOne : Apart {
    std::vector<std::int64_t> done;
    void sum(std::int64_t each) {
        sums(each);
        done.push_back(each);
    }
    void lose(int slot) {
        const auto ready = lost(slot);
        REQUIRE(ready->done && ready->status.ok());
        for (const auto each : done) {
            std::int64_t value = each;
            const auto again = rig.sum(slot, value);
            rig.settle();
            EXPECT(again->done && value == 3 * each);
        }
    }
    std::vector<RequestPtr> make_another(CommId id) {
        rig.comm(kThree, id, Policy::Replay);
        std::vector<RequestPtr> out;
        for (int s : kThree) out.push_back(rig.node(s).comm_ready(rig.now(), id));
        rig.settle();
        return out;
    }
};

}  // namespace

// A communicator that is made when a rank is past all that its processes have done was in none of their logs.
FT_TEST(restore_new_communicator_of_two_that_lost_their_logs_is_empty) {
    OneByOne a;
    a.sum(1);
    for (int victim : {1, 2}) {
        a.lose(victim);
        for (std::int64_t each : {4, 5}) a.sum(each);
    }
    constexpr CommId kOther = 8;
    for (const auto& ready : a.make_another(kOther)) EXPECT(ready->done && ready->status.ok());
    std::int64_t values[3] = {1, 2, 4};
    for (int s : kThree) a.rig.sum(s, values[s], kOther);
    a.rig.settle();
    for (auto v : values) EXPECT_EQ(v, 7);
    // It is on record: who dies with it goes on.
    a.kill(1);
    const auto ready = a.restart(1);
    a.rig.settle();
    EXPECT(ready->done && ready->status.ok());
    a.rig.join_comm(1, kThree, kOther, Policy::Replay);
    a.rig.settle();
    std::int64_t again = 2;
    const auto served = a.rig.sum(1, again, kOther);
    a.rig.settle();
    EXPECT(served->done && served->status.ok() && again == 7);
}

// Of one that is made before that nobody can tell whether it was.
FT_TEST(restore_communicator_of_two_that_lost_their_logs_may_be_an_old_one) {
    OneByOne a;
    a.sum(1);
    for (int victim : {1, 2}) a.lose(victim);
    const auto ready = a.make_another(8);
    EXPECT(has(a.refused(ready[1]), "has lost its log, too"));
}

}  // namespace ftcomm::unit
