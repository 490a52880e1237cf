// LoggedSums whose parts the ranks of one host read in their owners' logs while those are being written.
#include <algorithm>
#include <iterator>

#include "runtime/file_log.h"
#include "tests/node_rig.h"
#include "tests/pairlog_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

namespace {

std::unique_ptr<FileLog> log_of(const pairlog::Folder& folder, int slot) {
    FileLogConfig c;
    c.files = folder.config();
    c.files.path = folder.path + "/job/log";
    c.slot = slot;
    c.hosts = std::vector<std::uint64_t>(8, 1);
    std::unique_ptr<FileLog> log;
    EXPECT(FileLog::open(c, &log).ok());
    return log;
}

struct LoggedSums {
    explicit LoggedSums(Rig& rig) : rig_(rig) {}
    RequestPtr post(int slot, Algorithm algorithm = Algorithm::Ring) {
        data[slot].resize(kCount);
        for (std::size_t i = 0; i < kCount; ++i) data[slot][i] = static_cast<std::int64_t>(i) * (slot + 1);
        OpDesc d;
        d.kind = OpKind::AllReduce;
        d.dtype = DType::Int64;
        d.op = ReduceOp::Sum;
        d.algorithm = algorithm;
        d.count = kCount;
        d.recv = data[slot].data();
        return rig_.node(slot).collective(rig_.now(), Rig::kComm, d);
    }
    bool right() const { return std::all_of(std::begin(data), std::end(data), is_sum); }
    static bool is_sum(const std::vector<std::int64_t>& one) {
        for (std::size_t i = 0; i < kCount; ++i)
            if (one[i] != static_cast<std::int64_t>(6 * i)) return false;
        return one.size() == kCount;
    }
    static constexpr std::size_t kCount = 40'000;
    std::vector<std::int64_t> data[3];

private:
    Rig& rig_;
};

}  // namespace

FT_TEST(shared_results_are_read_as_long_as_they_stand) {
    pairlog::Folder folder;
    const LogKey key{7, 2, kResults};
    auto reader = log_of(folder, 1), writer = log_of(folder, 2);
    REQUIRE(reader != nullptr && writer != nullptr);
    Bytes got(100'000);
    std::uint32_t crc = 0;
    const auto piece = [&](std::uint64_t at, int value) {
        const Bytes part(150'000, std::byte(value));
        return writer->append_piece(key, 4, 0, 300'000, at, part, &crc);
    };
    Log::View view;
    const auto read = [&](std::uint64_t seq, std::uint64_t at) {
        auto s = reader->view_pieces(key, seq, at, got.size(), &view);
        if (s) got.assign(view.bytes.begin(), view.bytes.end());
        EXPECT(!s || view.stands());
        return s;
    };
    EXPECT(read(1, 0).code == Code::Invalid);
    EXPECT(piece(0, 1).ok() && read(1, 50'000).ok() && got.back() == std::byte(1));
    EXPECT(read(1, 50'001).code == Code::Invalid && read(2, 0).code == Code::Invalid);
    writer->abandon_pieces(key);
    EXPECT(read(1, 0).code == Code::Invalid);
    EXPECT(piece(0, 2).ok() && piece(150'000, 3).ok() && read(1, 100'000).ok());
    EXPECT(got.front() == std::byte(2) && got.back() == std::byte(3));
    EXPECT(writer->commit_pieces(key).ok() && read(1, 200'000).ok() && got.front() == std::byte(3));
    EXPECT(read(1, 200'001).code == Code::Invalid);
    // Another one is open when its process dies: who comes after it gives it up before it writes there. Who has seen it sees it until then.
    EXPECT(piece(0, 5).ok() && read(2, 0).ok());
    writer.reset();
    writer = log_of(folder, 2);
    REQUIRE(writer != nullptr);
    EXPECT_EQ(writer->last(key), 1u);
    EXPECT(view.stands() && view.bytes[99'999] == std::byte(5));
    EXPECT(read(2, 0).code == Code::Invalid && view.stands());
    const Bytes other(150'000, std::byte(6));
    EXPECT(writer->append_piece(key, 5, 0, 300'000, 0, other, &crc).ok() && !view.stands());
    EXPECT(read(1, 0).ok());
}

// Its owner dies before or after rank 1 hears that a part is final; and the owner's replacement may have come before that.
FT_TEST(shared_results_count_only_while_their_owner_stands) {
    for (const char* when : {"heard", "dead", "followed"}) {
        Rig::Setup setup;
        setup.replay = true;
        Rig rig(3, setup);
        rig.comm(kThree, Rig::kComm, Policy::Replay);
        LoggedSums sums(rig);
        rig.hold(2, 1);
        rig.hold(0, 2);  // so that it does not commit its record
        std::vector<RequestPtr> requests;
        for (int s : kThree) requests.push_back(sums.post(s));
        EXPECT(rig.deliver(2, 1) && rig.deliver(0, 2));  // they have entered
        rig.settle();
        REQUIRE(rig.carries(2, 1, FrameKind::Shared));
        const bool before = std::string(when) == "heard";
        if (before) rig.deliver_all(2, 1);
        rig.kill(2);
        if (std::string(when) == "followed") rig.restart(2);
        if (!before) rig.deliver_all(2, 1);
        rig.hold(2, 1, false);
        rig.hold(0, 2, false);
        for (int s : {0, 1}) rig.evidence(s, 2, Evidence::Pidfd, 0);
        rig.settle();
        if (std::string(when) != "followed") rig.restart(2);
        rig.settle();
        rig.join_comm(2, kThree, Rig::kComm, Policy::Replay);
        requests[2] = sums.post(2);
        rig.settle();
        for (const auto& r : requests) EXPECT(r->done && r->status.ok());
        EXPECT(sums.right());
    }
}

// A process that cannot map another's log asks for what it cannot read.
FT_TEST(shared_results_that_cannot_be_read_are_handed_out) {
    Rig::Setup setup;
    setup.replay = true;
    Rig rig(3, setup);
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    rig.log(0).blind = true;
    LoggedSums sums(rig);
    std::vector<RequestPtr> requests;
    for (int s : kThree) requests.push_back(sums.post(s));
    rig.settle();
    for (const auto& r : requests) EXPECT(r->done && r->status.ok());
    EXPECT(sums.right());
}

// A read of a final that breaks off, over the input: the log has the final.
FT_TEST(shared_results_make_up_for_a_read_that_breaks_off) {
    Rig::Setup setup;
    setup.replay = setup.reads = true;
    Rig rig(3, setup);
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    LoggedSums sums(rig);
    rig.hold(2, 1);
    std::vector<RequestPtr> requests;
    for (int s : kThree) requests.push_back(sums.post(s, Algorithm::Auto));
    EXPECT(rig.deliver(2, 1));  // it has entered
    rig.go_on(kThree);
    REQUIRE(rig.carries(2, 1, FrameKind::PullReady));
    rig.break_reads(2);
    rig.hold(2, 1, false);
    rig.go_on(kThree);
    for (const auto& r : requests) EXPECT(r->done && r->status.ok());
    EXPECT(sums.right());
}

// What is logged so is what would be logged otherwise: a process that runs again gets it.
FT_TEST(shared_results_are_served_like_others) {
    Rig::Setup setup;
    setup.replay = true;
    Rig rig(3, setup);
    rig.comm(kThree, Rig::kComm, Policy::Replay);
    for (int round = 0; round < 2; ++round) {
        LoggedSums sums(rig);
        for (int s : kThree) sums.post(s);
        rig.settle();
        EXPECT(sums.right());
    }
    std::uint64_t bytes = 0;
    for (const auto& [key, records] : rig.log(0).streams)
        for (const auto& record : records)
            if (key.dst == kResults) bytes += record.payload.size();
    EXPECT(bytes > 2 * 8 * LoggedSums::kCount && bytes < 2 * 8 * LoggedSums::kCount + 6 * 100);  // once, not once a rank
    rig.replace(1, 0, kThree);
    LoggedSums again(rig);
    const auto first = again.post(1);
    rig.settle();
    EXPECT(first->done && first->status.ok());
    EXPECT(LoggedSums::is_sum(again.data[1]));
}

}  // namespace ftcomm::unit
