// Large messages on one host: copied out of the log while they are written there.
#include <algorithm>
#include <deque>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

struct Pair {
    Pair() : rig(2, setup()) {
        rig.comm({0, 1}, Rig::kComm, Policy::Replay);
        for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(i * i / 5);
        rig.hold(0, 1);
    }
    static Rig::Setup setup() {
        Rig::Setup s;
        s.replay = true;
        return s;
    }
    void send() { EXPECT(rig.node(0).send(rig.now(), Rig::kComm, out.data(), out.size(), 1, 3)->status.ok()); }
    RequestPtr recv() { return rig.node(1).recv(rig.now(), Rig::kComm, in.data(), in.size(), 0, 3); }
    auto& record() {
        for (auto& [key, records] : rig.log(0).streams)
            if (key.comm == Rig::kComm && key.src == 0 && key.dst == 1) return records.front();
        static LogFiles::Record none;
        return none;
    }
    std::size_t copied() const {
        return static_cast<std::size_t>(std::mismatch(in.begin(), in.end(), out.begin()).first - in.begin());
    }
    Bytes out = Bytes(5000), in = Bytes(5000, std::byte{0xee});
    Rig rig;
};

}  // namespace

FT_TEST(shown_messages_are_copied_as_they_come) {
    Pair p;
    const auto got = p.recv();
    p.send();
    REQUIRE(p.rig.carries(0, 1, FrameKind::LogShown));
    std::size_t before = 0;
    while (p.rig.in_flight(0, 1) > 1) {
        p.rig.deliver(0, 1);
        EXPECT(p.copied() > before && p.copied() < p.in.size() && !got->done);
        before = p.copied();
    }
    EXPECT(p.rig.carries(0, 1, FrameKind::LogMark));
    p.rig.deliver(0, 1);
    EXPECT(got->done && got->status.ok() && p.in == p.out);
}

FT_TEST(shown_messages_that_nobody_waits_for_are_copied_when_they_are_received) {
    Pair p;
    p.send();
    p.rig.deliver(0, 1);
    const auto got = p.recv();  // it is in the log by now
    EXPECT(got->done && got->status.ok() && p.in == p.out);
    p.rig.deliver_all(0, 1);
}

// What was copied before the damage is right; the rest is not, or nothing.
FT_TEST(shown_messages_are_checked) {
    for (const std::size_t at : {10u, 4990u}) {
        Pair p;
        const auto got = p.recv();
        p.send();
        if (at > 4000) p.rig.deliver(0, 1);
        p.record().payload[at] ^= std::byte{1};
        p.rig.deliver_all(0, 1);
        EXPECT(got->done && got->status.code == Code::LogCorrupt);
    }
}

// Its sender dies before it is committed; the next process says something longer.
FT_TEST(shown_messages_of_a_process_that_died_are_forgotten) {
    for (const std::int64_t tag : {3, 4}) {
        Pair p;
        Bytes in(20'000, std::byte{0xee}), longer(3 * p.out.size(), std::byte{1});
        const auto receive = [&](std::int64_t with) {
            return p.rig.node(1).recv(p.rig.now(), Rig::kComm, in.data(), p.out.size(), 0, with);
        };
        const auto got = receive(3);
        p.send();
        p.rig.deliver(0, 1);
        EXPECT(in[0] == p.out[0] && in[200] == p.out[200]);
        for (auto& [key, records] : p.rig.log(0).streams)
            if (key.comm == Rig::kComm && key.src == 0 && key.dst == 1) records.clear();
        p.rig.kill(0);
        p.rig.evidence(1, 0, Evidence::Pidfd);
        p.rig.settle();
        p.rig.restart(0);
        p.rig.hold(0, 1, false);
        p.rig.settle();
        p.rig.join_comm(0, {0, 1}, Rig::kComm, Policy::Replay);
        p.rig.settle();
        p.rig.node(0).send(p.rig.now(), Rig::kComm, longer.data(), longer.size(), 1, tag);
        p.rig.settle();
        EXPECT_EQ(got->done.load(), tag == 3);
        if (tag == 3) EXPECT(got->status.code == Code::Truncated);
        EXPECT(std::all_of(in.begin() + static_cast<std::ptrdiff_t>(p.out.size()), in.end(),
                           [](auto b) { return b == std::byte{0xee}; }));
    }
}

// A receive that was given up has its buffer back.
FT_TEST(shown_messages_leave_a_buffer_alone_that_is_given_back) {
    Pair p;
    const auto first = p.recv();
    p.send();
    p.rig.deliver(0, 1);
    p.rig.node(1).fail_request(p.rig.now(), first, Code::Cancelled);
    REQUIRE(first->done);
    std::fill(p.in.begin(), p.in.end(), std::byte{0xee});
    p.rig.deliver_all(0, 1);
    EXPECT(std::all_of(p.in.begin(), p.in.end(), [](auto b) { return b == std::byte{0xee}; }));
    const auto second = p.recv();
    EXPECT(second->done && second->status.ok() && p.in == p.out);
}

}  // namespace ftcomm::unit
