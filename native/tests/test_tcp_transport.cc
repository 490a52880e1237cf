#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "tests/tcp_rig.h"

namespace ftcomm {

using namespace rig;

FT_TEST(tcp_transport_many_ranks) {
    Job job(4);
    job.start();
    for (auto& r : job.ranks) EXPECT(r->wait([&] { return r->linked == 3; }));
    for (int from = 0; from < 4; ++from) {
        for (int to = 0; to < 4; ++to) {
            if (from == to) continue;
            job.ranks[static_cast<std::size_t>(from)]->send(to, 200, 0);
            job.ranks[static_cast<std::size_t>(from)]->send(to, 50, 70001);
            job.ranks[static_cast<std::size_t>(from)]->send(to, 5, 260000);
        }
    }
    for (auto& r : job.ranks) {
        EXPECT(r->wait([&] {
            int n = 0;
            for (const auto& [who, count] : r->received) n += count == 255;
            return n == 3;
        }));
        std::lock_guard guard(r->engine);
        EXPECT(!r->wrong);
        EXPECT(r->suspected.empty());
        EXPECT(r->heard > 0);
        EXPECT(r->tcp.unlinked().empty());
    }
}

FT_TEST(tcp_transport_flush_becomes_idle) {
    Job job(2);
    job.start();
    auto& a = *job.ranks[0];
    a.send(1, 3, 1000);
    EXPECT(a.wait([&] { return a.linked == 1; }));
    {
        std::lock_guard guard(a.engine);
        a.tcp.flush();
    }
    EXPECT(a.wait([&] { return a.idle > 0 || a.tcp.all_acknowledged(); }));
    EXPECT(job.ranks[1]->wait([&] { return job.ranks[1]->received[{0, 0}] == 3; }));
}

FT_TEST(tcp_transport_cuts_lose_nothing) {
    for (const int seed : {1, 2, 3}) {
        Job job(2);
        job.ranks[0]->cut_every = static_cast<std::uint64_t>(17 + seed);
        job.ranks[1]->cut_every = static_cast<std::uint64_t>(23 + seed);
        job.start();
        constexpr int kFrames = 600;
        for (int i = 0; i < kFrames / 100; ++i) {
            for (int r = 0; r < 2; ++r) {
                job.ranks[static_cast<std::size_t>(r)]->send(1 - r, 50, 100);
                job.ranks[static_cast<std::size_t>(r)]->send(1 - r, 50, 30000);
            }
        }
        for (int r = 0; r < 2; ++r) {
            auto& rank = *job.ranks[static_cast<std::size_t>(r)];
            EXPECT(rank.wait([&] { return rank.received[{1 - r, 0}] == kFrames; }));
            std::lock_guard guard(rank.engine);
            EXPECT(!rank.wrong);
            EXPECT(rank.suspected.empty());
        }
    }
}

FT_TEST(tcp_transport_faults_are_repaired) {
    struct Case {
        const char* spec;
        int rank;
    };
    // Only rank 0 sends: the points, which all ranks of this process share, are passed by one rank each.
    for (const auto& [spec, rank] : {Case{"rank=0,at=tcp.send:7,do=corrupt", 0}, Case{"rank=1,at=tcp.receive:7,do=corrupt", 1},
                                     Case{"rank=0,at=tcp.send:9,do=cut:1", 0}, Case{"rank=1,at=tcp.receive:9,do=cut:0", 1}}) {
        Job job(2);
        job.start();
        auto& receiver = *job.ranks[1];
        // Both: with no connection on the sender's side there would be nothing to cut.
        for (auto& r : job.ranks) EXPECT(r->wait([&] { return r->linked == 1; }));
        const auto status = fault::configure(spec, rank, 0);
        if (!EXPECT(status.ok())) unit::failed(__FILE__, __LINE__, status.message);
        job.ranks[0]->send(1, 50, 5000);
        // The link may have been cut behind the last frame: then it heals after all has come.
        EXPECT(receiver.wait([&] {
            return receiver.received[{0, 0}] == 50 && receiver.tcp.stats_json().find("\"reconnects\":0") == std::string::npos;
        }));
        REQUIRE(fault::configure("", rank, 0).ok());
        std::lock_guard guard(receiver.engine);
        EXPECT(!receiver.wrong);
        const auto stats = receiver.tcp.stats_json();
        if (!EXPECT(stats.find("\"reconnects\":0") == std::string::npos)) unit::failed(__FILE__, __LINE__, spec + stats);
    }
}

namespace {

constexpr std::uint32_t kPlaced = 100'000;  // whole kWholeBytes, and a third of what is read at once

// 400 frames from rank 0 to rank 1, every other one long; what the faults have broken is sent again.
void sends_long_ones(bool forgets, const char* faults, int faulty) {
    Job job(2);
    auto &sender = *job.ranks[0], &receiver = *job.ranks[1];
    sender.from_outside = receiver.places = true;
    receiver.forgets = forgets;
    job.start();
    for (auto& r : job.ranks) EXPECT(r->wait([&] { return r->linked == 1; }));
    REQUIRE(fault::configure(faults, faulty, 0).ok());
    for (int i = 0; i < 200; ++i) {
        sender.send(1, 1, kPlaced);
        sender.send(1, 1, 1000);
    }
    const bool mended = forgets || faults[0] != 0;
    EXPECT(receiver.wait([&] {
        return receiver.received[{0, 0}] == 400 &&
               (!mended || receiver.tcp.stats_json().find("\"reconnects\":0") == std::string::npos);
    }));
    REQUIRE(fault::configure("", faulty, 0).ok());
    {
        std::lock_guard guard(receiver.engine);
        EXPECT(!receiver.wrong);
        EXPECT(receiver.in_place > 0);
    }
    // Nothing is held any longer than it has to be.
    {
        std::lock_guard guard(sender.engine);
        sender.tcp.flush();
    }
    EXPECT(sender.wait([&] { return sender.tcp.all_acknowledged(); }));
    std::lock_guard guard(sender.engine);
    EXPECT(sender.released >= 200);
}

}  // namespace

FT_TEST(tcp_transport_sends_from_where_it_lies) { sends_long_ones(false, "", 0); }
FT_TEST(tcp_transport_mends_what_it_sends_from_there) {
    sends_long_ones(false, "rank=0,at=tcp.send:7,do=corrupt", 0);
    sends_long_ones(false, "rank=0,at=tcp.send:31,do=cut:1", 0);
    sends_long_ones(false, "rank=1,at=tcp.receive:9,do=corrupt", 1);
    sends_long_ones(false, "rank=1,at=tcp.receive:31,do=cut:0", 1);
}
FT_TEST(tcp_transport_mends_what_has_lost_its_place) { sends_long_ones(true, "", 0); }

FT_TEST(tcp_transport_refused_is_a_suspicion) {
    Job job(3);
    job.start();
    for (auto& r : job.ranks) EXPECT(r->wait([&] { return r->linked == 2; }));
    job.ranks[2].reset();
    for (int i = 0; i < 2; ++i) {
        auto& r = *job.ranks[static_cast<std::size_t>(i)];
        EXPECT(r.wait([&] { return !r.suspected.empty(); }));
        std::lock_guard guard(r.engine);
        EXPECT(!r.suspected.empty());  // once a round
        EXPECT_EQ(r.suspected[0].first, 2);
        r.tcp.detach(2);
        EXPECT(r.tcp.reserve(2, 0) == nullptr);
    }
    job.ranks[0]->send(1, 10, 10);
    EXPECT(job.ranks[1]->wait([&] { return job.ranks[1]->received[{0, 0}] == 10; }));
}

// What has arrived is read before anybody acts on a death (M10), though the loop has not come to it.
FT_TEST(tcp_transport_drains) {
    Job job(2);
    job.start();
    for (auto& r : job.ranks) EXPECT(r->wait([&] { return r->linked == 1; }));
    auto& receiver = *job.ranks[1];
    std::lock_guard guard(receiver.engine);  // its loop stands still
    job.ranks[0]->send(1, 20, 1000);
    receiver.tcp.drain(0);
    EXPECT_EQ((receiver.received[{0, 0}]), 20u);
    EXPECT(!receiver.wrong);
}

FT_TEST(tcp_transport_replacement) {
    Job job(2);
    job.start();
    auto& survivor = *job.ranks[0];
    EXPECT(survivor.wait([&] { return survivor.linked == 1; }));
    auto old = std::move(job.ranks[1]);
    {
        std::lock_guard guard(survivor.engine);
        survivor.tcp.detach(1);
    }
    // The voted-out incarnation keeps trying and is told so.
    EXPECT(old->told(0, "not part of the job any more"));
    // The survivor does not know where the replacement listens: it hears it from the replacement itself.
    Rank replacement(config(1, 2, 1));
    replacement.start({job.blobs[0], {}});
    replacement.send(0, 5, 100);
    EXPECT(survivor.wait([&] { return survivor.received[{1, 1}] == 5; }));
    {
        std::lock_guard guard(survivor.engine);
        EXPECT(survivor.tcp.reserve(1, 4) == nullptr);  // not attached yet
        survivor.tcp.attach(1, 1);
    }
    survivor.send(1, 7, 100);
    EXPECT(replacement.wait([&] { return replacement.received[{0, 0}] == 7; }));
    {
        std::lock_guard guard(survivor.engine);
        survivor.tcp.cut(1);
    }
    survivor.send(1, 7, 100);
    EXPECT(replacement.wait([&] { return replacement.received[{0, 0}] == 14; }));
    std::lock_guard guard(survivor.engine);
    EXPECT_EQ((survivor.received[{1, 0}]), 0u);
    EXPECT(!survivor.wrong && !replacement.wrong);
}

// Replacements dial at once, whatever their slot: two connections are made at the same time and one of them stays.
// Two replacements at once. One read the other's address, and then a view that still has the other's predecessor in it.
FT_TEST(tcp_transport_view_is_behind_the_addresses) {
    rig::Rank first(rig::config(0, 2, 1)), second(rig::config(1, 2, 1));
    first.start({Bytes(), second.tcp.address()});
    second.start({Bytes(), Bytes()});
    const auto attach = [](rig::Rank& rank, int slot, std::uint32_t incarnation) {
        std::lock_guard guard(rank.engine);
        rank.tcp.attach(slot, incarnation);
    };
    attach(first, 1, 0);
    attach(second, 0, 0);
    attach(first, 1, 1);
    attach(second, 0, 1);
    first.send(1, 3, 1000);
    second.send(0, 3, 1000);
    EXPECT(first.wait([&] { return first.received[{1, 1}] == 3; }));
    EXPECT(second.wait([&] { return second.received[{0, 1}] == 3; }));
}

FT_TEST(tcp_transport_both_dial) {
    for (int round = 0; round < 20; ++round) {
        Job job(2, 1);
        job.start();
        for (int r = 0; r < 2; ++r) job.ranks[static_cast<std::size_t>(r)]->send(1 - r, 30, 20000);
        for (int r = 0; r < 2; ++r) {
            auto& rank = *job.ranks[static_cast<std::size_t>(r)];
            EXPECT(rank.wait([&] { return rank.received[{1 - r, 1}] == 30; }));
            std::lock_guard guard(rank.engine);
            EXPECT(!rank.wrong);
            EXPECT(rank.suspected.empty());
            EXPECT_EQ(rank.linked, 1);
        }
    }
}

// A leaver does not wait for a peer that has gone before it acknowledged.
FT_TEST(tcp_transport_idle_without_the_gone) {
    Job job(2);
    job.start();
    auto& a = *job.ranks[0];
    EXPECT(a.wait([&] { return a.linked == 1; }));
    std::unique_lock lock(job.ranks[1]->engine);  // it can't acknowledge
    a.send(1, 3, 1000);
    {
        std::lock_guard guard(a.engine);
        EXPECT(!a.tcp.all_acknowledged());
        EXPECT_EQ(a.idle, 0);
    }
    job.ranks[1]->tcp.stop();
    lock.unlock();
    EXPECT(a.wait([&] { return a.idle == 1; }));
}

// What the engine's fork handler does: the child holds nothing of the parent's, and the parent does not notice.
FT_TEST(tcp_transport_closes_in_child) {
    Job job(2);
    job.start();
    for (auto& r : job.ranks) EXPECT(r->wait([&] { return r->linked == 1; }));
    for (auto& r : job.ranks) r->engine.lock();
    const auto child = ::fork();
    if (child == 0) {
        for (auto& r : job.ranks) {
            r->loop.close_in_child();
            r->tcp.close_in_child();
        }
        int sockets = 0;
        for (int fd = 0; fd < 1024; ++fd) {
            int type = 0;
            socklen_t length = sizeof type;
            sockets += ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM && fd > 2;
        }
        ::_exit(sockets == 0 ? 0 : 1);
    }
    for (auto& r : job.ranks) r->engine.unlock();
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    job.ranks[0]->send(1, 5, 100);
    EXPECT(job.ranks[1]->wait([&] { return job.ranks[1]->received[{0, 0}] == 5; }));
}

}  // namespace ftcomm
