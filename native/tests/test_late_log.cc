// Messages that are logged after they were sent: who dies in between computes them again, and nobody can tell.
#include <cstring>

#include "channel/late_log.h"
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

const LogKey kStream{Rig::kComm, 0, 1};

Rig::Setup late() {
    Rig::Setup s;
    s.replay = s.log_late = true;
    s.one_host = false;
    return s;
}
std::uint64_t logged(Rig& rig, int slot, const LogKey& key = kStream) { return rig.log(slot).streams[key].size(); }

Bytes bytes_of(const char* text) {
    Bytes b(std::strlen(text));
    std::memcpy(b.data(), text, b.size());
    return b;
}

}  // namespace

FT_TEST(late_records_are_found_at_once_and_written_in_order) {
    LogFiles files;
    MemoryLog log(files, 0, [](int) { return false; });
    LateLog late_log(&log, true);
    for (const char* text : {"one", "two", "three"}) {
        auto payload = bytes_of(text);
        EXPECT(late_log.append_later(kStream, 4, 0, payload).ok());
    }
    EXPECT_EQ(late_log.last(kStream), 3u);
    EXPECT_EQ(log.last(kStream), 0u);
    LogRecord record;
    EXPECT(late_log.find(kStream, 2, &record).ok() && record.payload.size() == 3);
    late_log.work();
    EXPECT_EQ(log.last(kStream), 1u);
    EXPECT(late_log.find(kStream, 3, &record).ok() && record.payload.size() == 5);
    // A record that may not be late does not pass those that are.
    const auto four = bytes_of("four");
    const ByteView part = four;
    EXPECT(late_log.append(kStream, 4, 0, std::span(&part, 1)).ok());
    EXPECT_EQ(log.last(kStream), 4u);
    EXPECT_EQ(late_log.records(), 0u);
    EXPECT(log.find(kStream, 4, &record).ok() && std::memcmp(record.payload.data(), "four", 4) == 0);
}

FT_TEST(late_records_are_due_at_the_second_tick) {
    LogFiles files;
    MemoryLog log(files, 0, [](int) { return false; });
    LateLog late_log(&log, true);
    auto payload = bytes_of("one");
    EXPECT(late_log.append_later(kStream, 4, 0, payload).ok());
    late_log.on_tick();
    EXPECT(!late_log.is_due());
    late_log.on_tick();
    EXPECT(late_log.is_due());
    late_log.work();
    EXPECT(!late_log.is_due() && !late_log.has_work());
}

FT_TEST(late_log_that_is_full_gives_buffers_back_and_keeps_what_was_sent) {
    LogFiles files;
    MemoryLog log(files, 0, [](int) { return false; });
    LateLog late_log(&log, true);
    files.limit = 2;
    auto buffer = bytes_of("held");
    bool released = false;
    EXPECT(late_log.append_held(kStream, 4, 0, buffer, [&] { released = true; }).ok());
    late_log.work();
    EXPECT(released && !late_log.has_work());
    buffer.assign(buffer.size(), std::byte{0});
    LogRecord record;
    EXPECT(late_log.find(kStream, 1, &record).ok() && std::memcmp(record.payload.data(), "held", 4) == 0);
    EXPECT(late_log.flush().code == Code::LogFull);
    files.limit = 100;
    EXPECT(late_log.flush().ok());
    EXPECT_EQ(log.last(kStream), 1u);
}

FT_TEST(late_message_that_died_with_its_sender_is_not_received_twice) {
    Rig rig(2, late());
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    std::int64_t out = 5, in = 0, more = 0;
    EXPECT(rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3)->done);
    auto got = rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
    rig.settle();
    EXPECT(got->done && in == 5);
    EXPECT_EQ(logged(rig, 0), 0u);
    EXPECT_EQ(logged(rig, 1), 1u);  // its own half
    rig.replace(0, 1, {0, 1});
    rig.settle();
    got = rig.node(1).recv(rig.now(), Rig::kComm, &more, sizeof more, 0, 3);
    rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    rig.settle();
    EXPECT(!got->done);
    out = 6;
    rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    rig.settle();
    EXPECT(got->done && more == 6);
    EXPECT(rig.node(0).flush_log(rig.now()).ok());
    EXPECT_EQ(logged(rig, 0), 2u);
}

FT_TEST(late_messages_are_logged_when_a_view_says_that_somebody_died) {
    Rig rig(3, late());
    rig.comm({0, 1, 2}, Rig::kComm, Policy::Replay);
    std::int64_t out = 5;
    rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
    rig.settle();
    EXPECT_EQ(logged(rig, 0), 0u);
    rig.kill(2);
    rig.evidence(0, 2, Evidence::Pidfd);
    rig.settle();
    EXPECT_EQ(logged(rig, 0), 1u);
}

// L15. A replacement begins at the mark: what was sent before it, nobody sends again.
FT_TEST(late_messages_are_logged_before_a_mark_that_counts_them) {
    Rig rig(2, late());
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    std::int64_t out = 5, in = 0;
    const auto message = [&] {
        rig.node(0).send(rig.now(), Rig::kComm, &out, sizeof out, 1, 3);
        rig.node(1).recv(rig.now(), Rig::kComm, &in, sizeof in, 0, 3);
        rig.settle();
    };
    message();
    EXPECT_EQ(logged(rig, 0), 0u);
    std::vector<RequestPtr> all;
    for (int r : {0, 1}) all.push_back(rig.node(r).comm_resume(rig.now(), Rig::kComm, ""));
    rig.settle();
    EXPECT_EQ(logged(rig, 0), 1u);
    message();
    LogKey second = kStream;
    second.part = 1;
    EXPECT_EQ(logged(rig, 0, second), 0u);
    for (int r : {0, 1}) all.push_back(rig.node(r).comm_commit(rig.now(), Rig::kComm, "1"));
    rig.settle();
    EXPECT_EQ(logged(rig, 0, second), 1u);
    for (const auto& request : all) EXPECT(request->done && request->status.ok());
}

FT_TEST(late_large_message_is_sent_at_once_and_done_when_it_is_logged) {
    for (bool cancel : {false, true}) {
        Rig rig(2, late());
        rig.comm({0, 1}, Rig::kComm, Policy::Replay);
        Bytes out(1000, std::byte{7}), in(1000);
        auto sent = rig.node(0).send(rig.now(), Rig::kComm, out.data(), out.size(), 1, 3);
        auto got = rig.node(1).recv(rig.now(), Rig::kComm, in.data(), in.size(), 0, 3);
        rig.settle();
        EXPECT(got->done && in == out);
        EXPECT(!sent->done && rig.node(0).has_idle_work());
        if (cancel) rig.node(0).fail_request(rig.now(), sent, Code::Cancelled);
        else rig.node(0).work(rig.now());
        EXPECT(sent->done && sent->status.ok());
        out.assign(out.size(), std::byte{8});  // the caller's again
        EXPECT(rig.node(0).flush_log(rig.now()).ok());
        EXPECT(rig.log(0).streams[kStream].at(0).payload == in);
    }
}

// What arrives is compared with the sender's sum before it is in the receiver's half, though it is written there, and to the waiting receive,
// as it comes.
FT_TEST(message_that_is_damaged_in_its_senders_log_is_not_received) {
    auto setup = late();
    setup.log_late = false;
    Rig rig(2, setup);
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    Bytes out(300'000, std::byte{7}), in(out.size());
    const auto got = rig.node(1).recv(rig.now(), Rig::kComm, in.data(), in.size(), 0, 3);
    rig.settle();
    rig.fill(0, 1);
    EXPECT(rig.node(0).send(rig.now(), Rig::kComm, out.data(), out.size(), 1, 3)->done);
    rig.log(0).streams[kStream].at(0).payload[out.size() - 1] ^= std::byte{4};
    rig.empty(0, 1);
    rig.settle();
    EXPECT(got->done && got->status.code == Code::LogCorrupt);
    EXPECT(got->status.message.find("damaged in its sender's log") != std::string::npos);
    EXPECT_EQ(logged(rig, 1), 0u);
}

}  // namespace ftcomm::unit
