// Sends for which the log has no room: a process that runs again is told the same, whatever room there is then.
#include <vector>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

// Two ranks, each on a host of its own; rank 0 sends.
struct Sender {
    Rig rig{2, Rig::replaying(false)};
    Sender() { rig.comm({0, 1}, Rig::kComm, Policy::Replay); }

    // The log has room for an answer, but for no message.
    void fill() { rig.log(0).limit = rig.log(0).bytes + 500; }
    void make_room() { rig.log(0).limit = ~std::uint64_t{0}; }
    Code send(std::byte what, int to = 1) {
        const Bytes data(1000, what);
        const auto request = rig.node(0).send(rig.now(), Rig::kComm, data.data(), data.size(), to, 3);
        rig.settle();
        REQUIRE(request->done);
        return request->status.code;
    }
    std::byte received() {
        Bytes data(1000);
        const auto request = rig.node(1).recv(rig.now(), Rig::kComm, data.data(), data.size(), 0, 3);
        rig.settle();
        REQUIRE(request->done && request->status.ok());
        return data[0];
    }
};

const std::vector<Code> kBoth(2, Code::Ok);

}  // namespace

FT_TEST(refused_sends_are_refused_again) {
    Sender s;
    EXPECT_EQ(s.send(std::byte{1}), Code::Ok);
    s.fill();
    EXPECT_EQ(s.send(std::byte{2}), Code::LogFull);
    EXPECT_EQ(s.send(std::byte{2}), Code::LogFull);
    EXPECT_EQ(s.send(std::byte{9}, 0), Code::LogFull);  // to itself, which is another stream
    s.make_room();
    EXPECT_EQ(s.send(std::byte{3}), Code::Ok);  // the program has thought of something else
    for (int again = 0; again < 2; ++again) {
        s.rig.replace(0, 1, {0, 1});
        EXPECT_EQ(s.send(std::byte{1}), Code::Ok);
        EXPECT_EQ(s.send(std::byte{2}), Code::LogFull);
        EXPECT_EQ(s.send(std::byte{2}), Code::LogFull);
        EXPECT_EQ(s.send(std::byte{9}, 0), Code::LogFull);
        EXPECT_EQ(s.send(std::byte{3}), Code::Ok);
    }
    EXPECT_EQ(s.send(std::byte{4}), Code::Ok);  // this one is new
    for (int n : {1, 3, 4}) EXPECT(s.received() == std::byte(n));
}

// Of two processes the second fills the log as well.
FT_TEST(refused_sends_of_several_processes) {
    Sender s;
    s.fill();
    EXPECT_EQ(s.send(std::byte{1}), Code::LogFull);
    s.rig.replace(0, 1, {0, 1});
    EXPECT_EQ(s.send(std::byte{1}), Code::LogFull);
    s.fill();
    EXPECT_EQ(s.send(std::byte{1}), Code::LogFull);
    s.make_room();
    EXPECT_EQ(s.send(std::byte{1}), Code::Ok);
    s.rig.replace(0, 1, {0, 1});
    for (int times = 0; times < 2; ++times) EXPECT_EQ(s.send(std::byte{1}), Code::LogFull);
    EXPECT_EQ(s.send(std::byte{1}), Code::Ok);
    EXPECT(s.received() == std::byte{1});
}

// Who goes on from a checkpoint does not ask for what was refused before it, and may be refused after it.
FT_TEST(refused_sends_and_checkpoints) {
    Sender s;
    EXPECT(codes(s.rig.mark_all("", false)) == kBoth);
    s.fill();
    EXPECT_EQ(s.send(std::byte{1}), Code::LogFull);
    EXPECT(!s.rig.node(0).comm_note(s.rig.now(), Rig::kComm, "here").ok());
    s.make_room();
    EXPECT(codes(s.rig.mark_all("a", true)) == kBoth);
    EXPECT(s.rig.node(0).comm_note(s.rig.now(), Rig::kComm, "here").ok());
    s.fill();
    EXPECT_EQ(s.send(std::byte{1}), Code::LogFull);
    s.make_room();
    EXPECT_EQ(s.send(std::byte{1}), Code::Ok);
    EXPECT(s.received() == std::byte{1});
    s.rig.replace(0, 1, {0, 1});
    const auto resumed = s.rig.mark(0, "a", false);
    s.rig.settle();
    EXPECT(resumed->done && resumed->status.ok());
    EXPECT_EQ(s.send(std::byte{1}), Code::LogFull);
    EXPECT_EQ(s.send(std::byte{1}), Code::Ok);
    EXPECT_EQ(s.send(std::byte{2}), Code::Ok);
    EXPECT(s.received() == std::byte{2});
}

}  // namespace ftcomm::unit
