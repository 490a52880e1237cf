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

// A log that has to survive the host: what is committed does after a flush().
class Disk final : public Log {
public:
    std::uint64_t last(const LogKey& key) override { return log.last(key); }
    std::uint64_t first(const LogKey& key) override { return log.first(key); }
    Status state(const LogKey& key) override { return log.state(key); }
    Status append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) override {
        return log.append(key, tag, aux, parts);
    }
    Status find(const LogKey& key, std::uint64_t seq, LogRecord* out) override { return log.find(key, seq, out); }
    Status peek(const LogKey& key, std::uint64_t seq, LogRecord* out) override { return log.peek(key, seq, out); }
    Status collect(const LogKey& key, std::uint64_t through) override { return log.collect(key, through); }
    bool readable(int slot) override { return log.readable(slot); }
    bool is_durable() const override { return true; }
    Status flush() override {
        ++flushes;
        return fails ? Status::error(Code::System, "the pretended disk is gone") : Status{};
    }

    LogFiles files;
    MemoryLog log{files, 0, [](int) { return false; }};
    int flushes = 0;
    bool fails = false;
};

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

// It goes out when somebody has time, and is logged on its way; its last piece says the sum of the whole.
FT_TEST(late_large_message_is_logged_as_it_goes_out) {
    Rig rig(2, late());
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    rig.settle();
    Bytes out(300'000, std::byte{7}), in(out.size());
    auto got = rig.node(1).recv(rig.now(), Rig::kComm, in.data(), in.size(), 0, 3);
    auto sent = rig.node(0).send(rig.now(), Rig::kComm, out.data(), out.size(), 1, 3);
    rig.settle();
    EXPECT(!rig.carries(0, 1, FrameKind::LogPiece) && rig.node(0).has_work());
    int pieces = 0;
    for (; rig.node(0).has_work() && !sent->done && pieces < 1000; ++pieces) rig.node(0).work(rig.now());
    EXPECT(pieces > 1);
    EXPECT(sent->done && sent->status.ok() && !got->done);
    EXPECT(rig.log(0).streams[kStream].at(0).payload == out);
    rig.log(0).streams[kStream].at(0).payload[5] ^= std::byte{4};  // what is under way is not read there
    rig.settle();
    EXPECT(got->done && in == out);
    EXPECT_EQ(logged(rig, 1), 1u);
    EXPECT(!rig.node(0).has_work() && !rig.node(0).has_idle_work());
}

// What goes out may be behind what is logged already, or of a record that has others before it.
FT_TEST(late_record_is_logged_from_what_goes_out_where_that_comes_next) {
    LogFiles files;
    MemoryLog log(files, 0, [](int) { return false; });
    LateLog late_log(&log, true);
    const Bytes one(200'000, std::byte{1}), two(200'000, std::byte{2});
    int released = 0;
    for (const auto* payload : {&one, &two}) EXPECT(late_log.append_held(kStream, 4, 0, *payload, [&] { ++released; }).ok());
    std::optional<std::uint32_t> crc;
    late_log.append_sent(kStream, 2, 0, two, &crc);  // not before the first one
    EXPECT(!crc && log.last(kStream) == 0);
    late_log.work();  // 64 KiB of the first
    const ByteView all = one;
    late_log.append_sent(kStream, 1, 0, all.first(10'000), &crc);
    EXPECT(!crc);
    late_log.append_sent(kStream, 1, 150'000, all.subspan(150'000), &crc);  // there would be a gap
    EXPECT(!crc && log.last(kStream) == 0);
    late_log.append_sent(kStream, 1, 10'000, all.subspan(10'000), &crc);
    EXPECT(crc == crc32c(one.data(), one.size()) && released == 1);
    EXPECT(late_log.flush().ok());
    EXPECT(released == 2 && log.last(kStream) == 2);
    EXPECT(files.streams[kStream].at(0).payload == one && files.streams[kStream].at(1).payload == two);
}

// One that was logged as it went out waits for the sync like the others, also if it has overtaken older ones, or nothing else is late.
FT_TEST(late_record_that_was_logged_as_it_went_out_is_done_when_it_is_synced) {
    Disk disk;
    LateLog late_log(&disk, true);
    const LogKey other{Rig::kComm, 0, 2};
    const Bytes payload(200'000, std::byte{1});
    int released = 0;
    const auto post = [&](const LogKey& key) { EXPECT(late_log.append_held(key, 4, 0, payload, [&] { ++released; }).ok()); };
    const auto send = [&](const LogKey& key, std::uint64_t seq) {
        std::optional<std::uint32_t> crc;
        late_log.append_sent(key, seq, 0, payload, &crc);
        EXPECT(crc == crc32c(payload.data(), payload.size()));
    };
    post(kStream);
    post(other);
    send(other, 1);
    EXPECT(disk.last(other) == 1 && late_log.records() == 1);
    for (int i = 0; i < 4; ++i) late_log.work();
    EXPECT(late_log.records() == 0 && disk.last(kStream) == 1);
    EXPECT(released == 0 && disk.flushes == 0 && late_log.has_work() && !late_log.is_due());
    late_log.work();
    EXPECT(released == 2 && disk.flushes == 1 && !late_log.has_work());

    post(other);
    send(other, 2);
    EXPECT(late_log.records() == 0 && late_log.has_work() && released == 2);
    late_log.on_tick();
    EXPECT(!late_log.is_due());
    late_log.on_tick();
    EXPECT(late_log.is_due());
    late_log.work();
    EXPECT(released == 3 && disk.flushes == 2 && !late_log.is_due());

    // No more than a group of them waits.
    for (int i = 0; i < 50; ++i) {
        post(kStream);
        send(kStream, 2 + static_cast<std::uint64_t>(i));
    }
    EXPECT(released > 3 && released < 53 && disk.flushes == 3);

    // It is in the log, and not on the disk: synced again, and not logged again.
    disk.fails = true;
    EXPECT(late_log.flush().code == Code::System);
    EXPECT(!late_log.has_work());
    disk.fails = false;
    EXPECT(late_log.flush().ok());
    EXPECT(disk.last(kStream) == 51 && released == 53);
}

FT_TEST(late_record_that_others_have_overtaken_is_due) {
    LogFiles files;
    MemoryLog log(files, 0, [](int) { return false; });
    LateLog late_log(&log, true);
    const LogKey other{Rig::kComm, 0, 2};
    const Bytes payload(1000, std::byte{1});
    EXPECT(late_log.append_held(kStream, 4, 0, payload, [] {}).ok());
    late_log.on_tick();
    late_log.on_tick();
    EXPECT(late_log.append_held(other, 4, 0, payload, [] {}).ok());
    std::optional<std::uint32_t> crc;
    late_log.append_sent(other, 1, 0, payload, &crc);
    EXPECT(log.last(other) == 1 && late_log.is_due());
    late_log.work();
    EXPECT(!late_log.is_due() && !late_log.has_work());
}

FT_TEST(late_large_message_that_nobody_asks_for_is_done_when_it_is_logged_or_copied) {
    for (bool cancel : {false, true}) {
        Rig rig(2, late());
        rig.comm({0, 1}, Rig::kComm, Policy::Replay);
        rig.settle();
        rig.fill(0, 1);
        Bytes out(1000, std::byte{7}), in(1000);
        const auto first = out;
        auto sent = rig.node(0).send(rig.now(), Rig::kComm, out.data(), out.size(), 1, 3);
        auto got = rig.node(1).recv(rig.now(), Rig::kComm, in.data(), in.size(), 0, 3);
        rig.settle();
        EXPECT(!sent->done && rig.node(0).has_idle_work());
        if (cancel) rig.node(0).fail_request(rig.now(), sent, Code::Cancelled);
        else rig.node(0).work(rig.now());
        EXPECT(sent->done && sent->status.ok());
        out.assign(out.size(), std::byte{8});  // the caller's again
        EXPECT(rig.node(0).flush_log(rig.now()).ok());
        EXPECT(rig.log(0).streams[kStream].at(0).payload == first);
        rig.empty(0, 1);
        rig.settle();
        EXPECT(got->done && in == first);
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
