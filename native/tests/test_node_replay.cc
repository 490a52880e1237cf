// The policy replay: a process that died runs again from the top, and nobody can tell from the results.
#include "base/crc32c.h"
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

FT_TEST(replay_serves_what_is_complete_and_waits_for_the_rest) {
    Rig rig(3, Rig::replaying());
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t a[3] = {1, 2, 4}, b[3] = {10, 20, 40};
    for (int s : kThree) rig.sum(s, a[s]);
    rig.settle();
    for (auto x : a) EXPECT_EQ(x, 7);
    const auto first = rig.sum(0, b[0]), second = rig.sum(1, b[1]);
    rig.settle();
    rig.kill(2);
    rig.evidence(0, 2, Evidence::Pidfd);
    rig.settle();
    EXPECT(!first->done && !second->done);
    rig.restart(2);
    rig.settle();
    EXPECT_EQ(rig.node(0).alive_slots().text(), "{0,1,2}");
    rig.join_comm(2, kThree, Rig::kComm, Policy::Replay);
    rig.settle();
    std::int64_t again = 4;
    const auto served = rig.sum(2, again);
    rig.settle();
    REQUIRE(served->done);
    EXPECT_EQ(again, 7);
    const auto third = rig.sum(2, b[2]);
    rig.settle();
    REQUIRE(first->done && second->done && third->done);
    for (auto x : b) EXPECT_EQ(x, 70);
}

FT_TEST(replay_message_is_delivered_once_whoever_dies) {
    for (bool one_host : {true, false}) {
        Rig rig(2, Rig::replaying(one_host));
        rig.comm({0, 1}, Rig::kComm, Policy::Replay);
        std::int64_t out = 5, in = 0, in2 = 0;
        auto sent = rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
        EXPECT(sent->done && sent->status.ok());
        out = 6;
        rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
        auto got = rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
        rig.settle();
        EXPECT(got->done && in == 5);
        rig.replace(1, 0, {0, 1});
        in = 0;
        got = rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
        auto got2 = rig.node(1).recv(rig.now(), Rig::kComm, &in2, sizeof in2, 0, 3);
        rig.settle();
        EXPECT(got->done && in == 5);
        EXPECT(got2->done && in2 == 6);
        rig.replace(0, 1, {0, 1});  // now the sender: it sends the same again, then a third
        for (std::int64_t x : {5, 6, 7}) {
            sent = rig.node(0).send(rig.now(), Rig::kComm, &x, sizeof x, 1, 3);
            EXPECT(sent->done && sent->status.ok());
        }
        auto got3 = rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
        rig.settle();
        EXPECT(got3->done && in == 7);
    }
}

// What is in the log before its frame comes belongs to the receive that waits, not to the one that looks there first.
FT_TEST(replay_receives_of_one_source_and_tag_keep_their_order) {
    Rig rig(2, Rig::replaying());
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    std::int64_t in[3] = {}, other = 0;
    const auto receive = [&](std::int64_t* to, std::int64_t tag) {
        return rig.node(1).recv(rig.now(), Rig::kComm, to, sizeof *to, 0, tag);
    };
    const auto first = receive(&in[0], 3);
    std::int64_t out = 5;
    rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    const auto of_other = receive(&other, 4);
    const auto second = receive(&in[1], 3);
    EXPECT(first->done && in[0] == 5);
    for (std::int64_t x : {6, 7}) rig.node(0).send(rig.now(), Rig::kComm, &x, sizeof x, 1, 3);
    const auto third = receive(&in[2], 3);
    rig.settle();
    REQUIRE(second->done && third->done);
    EXPECT(in[1] == 6 && in[2] == 7);
    EXPECT(!of_other->done);
}

FT_TEST(replay_records_say_where_the_program_was) {
    for (bool late : {false, true}) {
        auto setup = Rig::replaying(!late);
        setup.log_late = late;
        Rig rig(2, setup);
        rig.comm({0, 1}, Rig::kComm, Policy::Replay);
        const std::int64_t out = 5;
        const auto send = [&] { return rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3); };
        send();
        rig.node(0).comm_log_position(Rig::kComm, 12, std::nullopt);
        for (int n = 0; n < 2; ++n) send();
        rig.node(0).comm_log_position(Rig::kComm, 13, 7);
        for (int n = 0; n < 2; ++n) send();
        EXPECT(rig.node(0).flush_log(rig.now()).ok());
        MemoryLog log(rig.log(0), 0, [](int) { return true; });
        const std::vector<std::pair<std::uint64_t, std::uint32_t>> wanted = {{0, 0}, {12, 0}, {12, 1}, {13, 7}, {13, 7}};
        for (std::size_t n = 0; n < wanted.size(); ++n) {
            LogRecord record;
            REQUIRE(log.find({Rig::kComm, 0, 1}, n + 1, &record).ok());
            EXPECT(record.position.iteration == wanted[n].first && record.position.micro_batch == wanted[n].second);
        }
        rig.kill(0);
        rig.evidence(1, 0, Evidence::Pidfd);
        rig.settle();
        rig.restart(0);
        rig.settle();
        rig.join_comm(0, {0, 1}, Rig::kComm, Policy::Replay);
        for (int n = 0; n < 2; ++n) send();
        const std::int64_t other = 6;
        const auto differs = rig.node(0).send(rig.now(), Rig::kComm, &other, sizeof other, 1, 3);
        REQUIRE(differs->done);
        EXPECT(differs->status.message.find("message #3 (iteration 12, micro-batch 1) to rank 1") != std::string::npos);
    }
}

FT_TEST(replay_that_sends_something_else_is_told) {
    Rig rig(2, Rig::replaying());
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    std::int64_t out = 5;
    rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    rig.replace(0, 1, {0, 1});
    out = 6;
    const auto sent = rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    EXPECT(sent->done);
    EXPECT_EQ(sent->status.code, Code::ReplayDiverged);
}

// A process that goes through what is in its log without computing it.
FT_TEST(replay_hollow_sends_stay_inside) {
    for (bool resumed : {false, true}) {
        Rig rig(2, Rig::replaying());
        rig.comm({0, 1}, Rig::kComm, Policy::Replay);
        std::int64_t out = 5, in = 0;
        const auto send = [&](std::int64_t tag, std::uint64_t bytes = 8) {
            return rig.node(0).send(rig.now(), Rig::kComm, &out, bytes, 1, tag);
        };
        if (resumed) {
            const auto requests = {rig.node(0).comm_resume(rig.now(), Rig::kComm, ""),
                                   rig.node(1).comm_resume(rig.now(), Rig::kComm, "")};
            rig.settle();
            for (const auto& request : requests) REQUIRE(request->done && request->status.ok());
        }
        for (int n = 0; n < 3; ++n) send(3);
        rig.node(1).send(rig.now(), Rig::kComm, &out, 8, 0, 4);
        rig.replace(0, 1, {0, 1});
        auto ahead = rig.node(0).comm_ahead(Rig::kComm);
        REQUIRE(ahead.has_value());
        if (resumed) {
            EXPECT_EQ(ahead->receives_left[1], 0u);  // before it has said where it goes on
            const auto again = rig.node(0).comm_resume(rig.now(), Rig::kComm, "");
            rig.settle();
            REQUIRE(again->done && again->status.ok());
            ahead = rig.node(0).comm_ahead(Rig::kComm);
        }
        EXPECT_EQ(ahead->sends_left[1], 3u);
        EXPECT_EQ(ahead->receives_left[1], 1u);
        LogRecord first;
        EXPECT(rig.node(0).comm_logged(Rig::kComm, 1, 1, &first).ok());
        EXPECT(first.payload.size() == 8 && first.crc == crc32c(&out, 8));
        EXPECT_EQ(rig.node(0).comm_logged(Rig::kComm, 1, 4, &first).code, Code::Invalid);
        EXPECT_EQ(rig.node(0).comm_logged(Rig::kComm, 2, 1, &first).code, Code::Invalid);
        EXPECT(rig.node(0).comm_hollow(Rig::kComm, true));
        out = 6;
        EXPECT(send(3)->status.ok());
        EXPECT_EQ(send(3, 4)->status.code, Code::ReplayDiverged);  // of another size
        EXPECT_EQ(send(2)->status.code, Code::ReplayDiverged);     // with another tag
        rig.node(0).comm_hollow(Rig::kComm, false);
        EXPECT_EQ(send(3)->status.code, Code::ReplayDiverged);  // compared whole again
        rig.node(0).comm_hollow(Rig::kComm, true);
        EXPECT(send(3)->status.ok());
        EXPECT(send(3)->status.ok());
        EXPECT_EQ(rig.node(0).comm_ahead(Rig::kComm)->sends_left[1], 0u);
        const auto fourth = send(3);
        REQUIRE(fourth->done);
        EXPECT_EQ(fourth->status.code, Code::Invalid);
        EXPECT(fourth->status.message.find("message #4 to rank 1") != std::string::npos);
        rig.settle();
        for (int n = 0; n < 3; ++n) {
            const auto got = rig.node(1).recv(rig.now(), Rig::kComm, &in, 8, 0, 3);
            REQUIRE(got->done);
            EXPECT_EQ(in, 5);
        }
        const auto nothing = rig.node(1).recv(rig.now(), Rig::kComm, &in, 8, 0, 3);
        rig.settle();
        EXPECT(!nothing->done);
        rig.node(0).comm_hollow(Rig::kComm, false);
        EXPECT(send(3)->status.ok());  // it has lost none of its numbers
        rig.settle();
        EXPECT(nothing->done && in == 6);
    }
}

// Rank 1 completed an operation that rank 0 has not, and died. Its replacement has only the log of it, and is on the way from 2 to 0.
FT_TEST(replay_hands_on_what_it_has_in_its_log_only) {
    auto setup = Rig::replaying();
    setup.one_host = false;  // its log has all of it
    Rig rig(3, setup);
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t a[3] = {1, 2, 4}, b[3] = {10, 20, 40};
    for (int s : kThree) rig.sum(s, a[s]);
    rig.settle();
    rig.hold(1, 0);
    rig.hold(2, 0);
    const auto first = rig.sum(0, b[0]), second = rig.sum(1, b[1]), third = rig.sum(2, b[2]);
    rig.settle();
    EXPECT(!first->done && second->done && third->done);
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.settle();
    rig.hold(1, 0, false);
    rig.hold(2, 0, false);
    rig.restart(1);
    rig.settle();
    rig.join_comm(1, kThree, Rig::kComm, Policy::Replay);
    rig.settle();
    REQUIRE(first->done);
    EXPECT_EQ(b[0], 70);
}

// An operation without data is all there from the start: told that it is complete elsewhere, a rank logs it all the same.
FT_TEST(replay_logs_what_the_vote_completes) {
    Rig rig(3, Rig::replaying());
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t unused = 0, a[3] = {1, 2, 4};
    OpDesc nothing;
    nothing.kind = OpKind::AllReduce;
    nothing.dtype = DType::Int64;
    nothing.op = ReduceOp::Sum;
    nothing.recv = &unused;
    const auto post = [&](int s) { return rig.node(s).collective(rig.now(), Rig::kComm, nothing); };
    const auto reborn = [&](int s) { rig.replace(s, 0, kThree); };
    rig.hold(0, 2);
    rig.hold(1, 2);
    for (int s : kThree) post(s);
    rig.settle();
    rig.kill(2);
    rig.hold(0, 2, false);
    reborn(2);
    rig.settle();
    const auto again = post(2);
    rig.settle();
    EXPECT(!again->done);
    reborn(1);
    rig.hold(1, 2, false);
    rig.settle();
    REQUIRE(again->done && again->status.ok());
    const LogKey results{Rig::kComm, 2, kResults};
    EXPECT_EQ(rig.log(2).streams[results].size(), 1u);
    post(1);
    std::vector<RequestPtr> sums;
    for (int s : kThree) sums.push_back(rig.sum(s, a[s]));
    rig.settle();
    for (const auto& r : sums) EXPECT(r->done && r->status.ok());
    EXPECT_EQ(rig.log(2).streams[results].size(), 2u);
}

// What comes is summed straight into the record that goes out. If it is not what its sender wrote, no record goes out, and no buffer gets it;
// in the second half likewise, when the final itself is damaged (`steps` records of the victim are read before).
FT_TEST(replay_damaged_part_of_a_logged_ring_goes_no_further) {
    for (std::size_t steps : {0, 1, 2, 3}) {
        Rig rig(3, Rig::replaying());
        rig.comm(kThree, Rig::kComm, Policy::Replay);
        std::vector<std::int64_t> data[3];
        const auto post = [&](int slot) {
            data[slot].assign(30000, slot + 1);  // in chunks
            OpDesc d;
            d.kind = OpKind::AllReduce;
            d.dtype = DType::Int64;
            d.op = ReduceOp::Sum;
            d.algorithm = Algorithm::RingLogged;
            d.count = data[slot].size();
            d.recv = data[slot].data();
            return rig.node(slot).collective(rig.now(), Rig::kComm, d);
        };
        const auto stream = [&](int src, int dst) -> auto& {
            static std::deque<LogFiles::Record> none;
            for (auto& [key, records] : rig.log(src).streams)
                if (key.comm != Rig::kComm && key.src == src && key.dst == dst) return records;
            return none;
        };
        rig.hold(0, 1);
        rig.hold(1, 2);
        rig.hold(2, 0);
        RequestPtr sums[3];
        bool damaged = false;
        const auto damage = [&] {
            if (damaged || stream(0, 1).size() <= steps) return;
            stream(0, 1)[steps].payload[5] ^= std::byte{4};
            damaged = true;
        };
        for (int s : kThree) {
            sums[s] = post(s);
            damage();
        }
        for (bool moved = true; moved;) {
            moved = false;
            for (int s : {2, 0, 1}) {
                if (s == 1) damage();
                moved |= rig.deliver((s + 2) % 3, s);
            }
        }
        REQUIRE(damaged && sums[1]->done);
        EXPECT(sums[1]->status.code == Code::LogCorrupt);
        EXPECT_EQ(stream(1, 2).size(), steps + 1);
        if (steps < 3)  // the last one is long, and was looked at on its way into the buffer
            for (auto x : data[1]) EXPECT(x == 2 || x == 6);
    }
}

FT_TEST(replay_log_that_cannot_be_read_is_not_an_empty_one) {
    for (const auto& key :
         {LogKey{Rig::kComm, 2, kResults}, LogKey{Rig::kComm, 2, kAnswers}, LogKey{Rig::kComm, 2, kMarks},
          LogKey{Rig::kComm, 2, 0}, LogKey{Rig::kComm, 1, 2}, LogKey{Rig::kComm, 2, kHeard}, LogKey{Rig::kComm, 2, kHeard, 1}}) {
        Rig rig(3, Rig::replaying());
        rig.comm(kThree, Rig::kComm, Policy::Replay);
        std::int64_t x[3] = {1, 2, 4};
        for (int s : kThree) rig.sum(s, x[s]);
        rig.settle();
        rig.kill(2);
        rig.evidence(0, 2, Evidence::Pidfd);
        rig.settle();
        rig.log(2).damaged[key] = Status::error(Code::LogCorrupt, "of another version");
        rig.restart(2);
        rig.settle();
        CommSpec spec;
        spec.id = Rig::kComm;
        spec.name = "rig";
        spec.members = kThree;
        spec.policy = Policy::Replay;
        EXPECT_EQ(rig.node(2).create_comm(rig.now(), spec).code, Code::LogCorrupt);
        EXPECT(rig.sum(2, x[2])->done);
    }
}

// Threads that receive different tags from anyone need not take turns in the same order again.
FT_TEST(replay_answers_are_counted_by_tag) {
    Rig rig(3, Rig::replaying());
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    std::int64_t in[4] = {};
    const auto receive = [&](int i, std::int64_t tag) {
        auto r = rig.node(1).recv(rig.now(), Rig::kComm, &in[i], sizeof in[i], kAny, tag);
        rig.settle();
        EXPECT(r->done && r->status.ok());
        return r->source;
    };
    const auto say = [&](int from, std::int64_t tag) {
        std::int64_t out = 10 * from + tag;
        rig.node(from).send(rig.now(), Rig::kComm, &out, sizeof out, 1, tag);
        rig.settle();
    };
    say(2, 5);
    say(0, 6);
    EXPECT_EQ(receive(0, 5), 2);
    EXPECT_EQ(receive(1, 6), 0);
    say(0, 5);
    say(2, 6);
    rig.replace(1, 0, kThree);
    EXPECT_EQ(receive(1, 6), 0);
    EXPECT_EQ(receive(0, 5), 2);
    EXPECT_EQ(receive(2, 5), 0);
    EXPECT_EQ(receive(3, 6), 2);
}

// The message that came after it was given up belongs to the next receive, in every run.
FT_TEST(replay_receive_that_was_given_up_stays_so) {
    for (bool cancelled : {true, false}) {
        for (int source : {0, kAny}) {
            auto setup = Rig::replaying();
            setup.timeout = 10 * Rig::kHeartbeat;
            Rig rig(2, setup);
            rig.comm({0, 1}, Rig::kComm, Policy::Replay);
            std::int64_t in[2] = {}, out = 5;
            const auto receive = [&](int i) { return rig.node(1).recv(rig.now(), Rig::kComm, &in[i], sizeof in[i], source, 3); };
            const auto first = receive(0);
            if (cancelled) rig.node(1).fail_request(rig.now(), first, Code::Cancelled);
            else rig.advance(11 * Rig::kHeartbeat);
            REQUIRE(first->done);
            rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
            rig.settle();
            EXPECT(receive(1)->done && in[1] == 5);
            rig.replace(1, 0, {0, 1});
            in[1] = 0;
            const auto again = receive(0);
            rig.settle();
            REQUIRE(again->done);
            EXPECT_EQ(again->status.code, cancelled ? Code::Cancelled : Code::Timeout);
            EXPECT_EQ(again->status.message, first->status.message);
            const auto second = receive(1);
            rig.settle();
            EXPECT(second->done && second->status.ok() && in[1] == 5);
        }
    }
}

}  // namespace ftcomm::unit
