// Real sockets on loopback: ranks of one job in one process, each with its own loop and engine lock.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/failpoint.h"
#include "base/random.h"
#include "tests/unit.h"
#include "transport/tcp/addresses.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/tcp_transport.h"

namespace ftcomm {

namespace {

constexpr std::uint64_t kBoot = 77;
constexpr auto kPatience = std::chrono::seconds(60);  // for a broken implementation only

Bytes pattern(std::uint64_t number, std::uint32_t length) {
    Bytes out(length);
    for (std::uint32_t i = 0; i < length; ++i) out[i] = static_cast<std::byte>(number * 13 + i * 5 + (i >> 8));
    return out;
}

// What a node would do: sends numbered frames as there is room, checks those that arrive.
class Rank : public TcpEvents {
public:
    explicit Rank(TcpConfig config) : loop(engine), tcp(config, loop, *this), slot_(config.slot) {
        REQUIRE(loop.start().ok());
        const auto status = tcp.listen();
        if (!EXPECT(status.ok())) unit::failed(__FILE__, __LINE__, status.message);
    }
    ~Rank() override {
        {
            std::lock_guard guard(engine);
            tcp.stop();
        }
        loop.stop();
    }

    void start(const std::vector<Bytes>& peers, std::uint64_t boot = kBoot) {
        std::lock_guard guard(engine);
        const auto status = tcp.start(peers, boot);
        if (!EXPECT(status.ok())) unit::failed(__FILE__, __LINE__, status.message);
    }
    void send(int to, int frames, std::uint32_t length) {
        std::lock_guard guard(engine);
        for (int i = 0; i < frames; ++i) outbox_[to].push_back(length);
        pump(to);
    }
    template <class F>
    bool wait(F condition) {
        std::unique_lock lock(engine);
        return changed.wait_for(lock, kPatience, condition);
    }

    void on_frame(int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload) override {
        auto& seen = received[{slot, incarnation}];
        const auto expected = pattern(seen, header.length);
        if (header.seq != seen || !std::equal(expected.begin(), expected.end(), payload.begin(), payload.end())) {
            wrong = true;
        }
        ++seen;
        if (cut_every > 0 && seen % cut_every == 0) tcp.cut(slot);
        changed.notify_all();
    }
    void on_writable(int slot) override { pump(slot); }
    void on_heard(int, std::uint32_t) override { ++heard; }
    void on_suspicion(int slot, std::uint32_t incarnation, Evidence evidence) override {
        EXPECT_EQ(evidence, Evidence::Reset);
        suspected.emplace_back(slot, incarnation);
        changed.notify_all();
    }
    void on_linked(int, std::uint32_t) override {
        ++linked;
        changed.notify_all();
    }
    void on_idle() override {
        ++idle;
        changed.notify_all();
    }
    void on_log(const std::string& text) override {
        log += text + "\n";
        changed.notify_all();
    }

    std::mutex engine;
    std::condition_variable changed;
    IoLoop loop;
    TcpTransport tcp;
    std::map<std::pair<int, std::uint32_t>, std::uint64_t> received;
    std::vector<std::pair<int, std::uint32_t>> suspected;
    std::string log;
    int linked = 0, heard = 0, idle = 0;
    std::uint64_t cut_every = 0;
    bool wrong = false;

private:
    void pump(int to) {
        auto& box = outbox_[to];
        while (!box.empty()) {
            const auto length = box.front();
            auto* at = tcp.reserve(to, length);
            if (at == nullptr) return;
            const auto data = pattern(sent_[to], length);
            if (length > 0) std::memcpy(at, data.data(), length);
            FrameHeader header;
            header.length = length;
            header.seq = sent_[to]++;
            tcp.commit(to, header);
            box.pop_front();
        }
    }
    int slot_;
    std::map<int, std::deque<std::uint32_t>> outbox_;
    std::map<int, std::uint64_t> sent_;
};

TcpConfig config(int slot, int world, std::uint32_t incarnation = 0) {
    TcpConfig c;
    c.job = "test";
    c.slot = slot;
    c.world_size = world;
    c.incarnation = incarnation;
    c.host = static_cast<std::uint64_t>(slot) + 1;
    c.ring_bytes = 1u << 20;
    return c;
}

struct Job {
    explicit Job(int n) {
        for (int i = 0; i < n; ++i) ranks.push_back(std::make_unique<Rank>(config(i, n)));
        for (auto& r : ranks) blobs.push_back(r->tcp.address());
    }
    void start() {
        for (auto& r : ranks) r->start(blobs);
    }
    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<Bytes> blobs;
};

// A socket to the first address of a blob.
int stranger(const Bytes& blob) {
    tcp::AddressBlob decoded;
    EXPECT(tcp::AddressBlob::decode(blob, &decoded).ok());
    sockaddr_storage to;
    const auto length = decoded.addresses.at(0).to_sockaddr(&to);
    const int fd = ::socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(::connect(fd, reinterpret_cast<sockaddr*>(&to), length) == 0);
    return fd;
}

void put(int fd, const Bytes& data) { static_cast<void>(!::send(fd, data.data(), data.size(), MSG_NOSIGNAL)); }

// Until the other side closes.
void drain(int fd) {
    char sink[256];
    while (::recv(fd, sink, sizeof sink, 0) > 0) {
    }
}

}  // namespace

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
        EXPECT(receiver.wait([&] { return receiver.linked == 1; }));
        const auto status = fault::configure(spec, rank, 0);
        if (!EXPECT(status.ok())) unit::failed(__FILE__, __LINE__, status.message);
        job.ranks[0]->send(1, 50, 5000);
        EXPECT(receiver.wait([&] { return receiver.received[{0, 0}] == 50; }));
        REQUIRE(fault::configure("", rank, 0).ok());
        std::lock_guard guard(receiver.engine);
        EXPECT(!receiver.wrong);
        const auto stats = receiver.tcp.stats_json();
        if (!EXPECT(stats.find("\"reconnects\":0") == std::string::npos)) unit::failed(__FILE__, __LINE__, spec + stats);
    }
}

FT_TEST(tcp_transport_strangers) {
    Job job(2);
    job.start();
    Random random(5);
    std::vector<int> strangers;
    const auto& target = job.blobs[0];
    for (int round = 0; round < 150; ++round) {
        const int fd = stranger(target);
        Bytes data;
        switch (round % 5) {
            case 0: break;  // says nothing
            case 1:
                data.resize(random.below(9000));
                for (auto& b : data) b = static_cast<std::byte>(random.below(256));
                break;
            case 2: {  // half a greeting, with another secret
                tcp::Identity id;
                auto h = tcp::Handshake::dialer(id, tcp::handshake_key({}, "other", 1), {}, {0, 0, 0});
                data = h.take_output();
                data.resize(data.size() / 2);
                break;
            }
            case 3:
                data = {std::byte{0x43}, std::byte{0x4f}, std::byte{0x4d}, std::byte{0x48}, std::byte{1}, std::byte{0},
                        std::byte{255}, std::byte{255}};  // an oversized frame
                break;
            case 4: {  // the right job, but no key
                tcp::Identity id;
                id.job = hash64(std::as_bytes(std::span("test", 4)));
                id.boot = tcp::boot_tag("test", kBoot);
                id.world_size = 2;
                id.slot = 1;
                auto h = tcp::Handshake::dialer(id, tcp::handshake_key({}, "test", kBoot + 1), {}, {0, 0, 0});
                data = h.take_output();
                break;
            }
        }
        put(fd, data);
        strangers.push_back(fd);
        if (round % 10 == 0) job.ranks[1]->send(0, 20, 2000);
        if (round % 10 == 5) job.ranks[0]->send(1, 20, 2000);
    }
    for (int r = 0; r < 2; ++r) {
        auto& rank = *job.ranks[static_cast<std::size_t>(r)];
        EXPECT(rank.wait([&] { return rank.received[{1 - r, 0}] == 300; }));
        std::lock_guard guard(rank.engine);
        EXPECT(!rank.wrong);
        EXPECT(rank.suspected.empty());
    }
    for (const int fd : strangers) {
        drain(fd);  // every one is thrown out, the silent ones after a heartbeat
        ::close(fd);
    }
}

FT_TEST(tcp_transport_refused_is_a_suspicion) {
    Job job(3);
    job.start();
    for (auto& r : job.ranks) EXPECT(r->wait([&] { return r->linked == 2; }));
    job.ranks[2].reset();
    for (int i = 0; i < 2; ++i) {
        auto& r = *job.ranks[static_cast<std::size_t>(i)];
        EXPECT(r.wait([&] { return !r.suspected.empty(); }));
        std::lock_guard guard(r.engine);
        EXPECT_EQ(r.suspected.size(), 1u);
        EXPECT_EQ(r.suspected[0].first, 2);
        r.tcp.detach(2);
        EXPECT(r.tcp.reserve(2, 0) == nullptr);
    }
    job.ranks[0]->send(1, 10, 10);
    EXPECT(job.ranks[1]->wait([&] { return job.ranks[1]->received[{0, 0}] == 10; }));
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
    // The voted-out incarnation keeps trying and is told so.
    EXPECT(old->wait([&] { return old->tcp.why(0).find("not part of the job any more") != std::string::npos; }));
    std::lock_guard guard(survivor.engine);
    EXPECT_EQ((survivor.received[{1, 0}]), 0u);
    EXPECT(!survivor.wrong && !replacement.wrong);
}

FT_TEST(tcp_transport_configuration_errors) {
    std::mutex engine;
    IoLoop loop(engine);
    REQUIRE(loop.start().ok());
    struct Quiet : TcpEvents {
        void on_frame(int, std::uint32_t, const FrameHeader&, ByteView) override {}
        void on_writable(int) override {}
        void on_heard(int, std::uint32_t) override {}
        void on_suspicion(int, std::uint32_t, Evidence) override {}
        void on_linked(int, std::uint32_t) override {}
        void on_log(const std::string&) override {}
    } quiet;
    const auto message = [&](const char* interface_, bool secret) {
        auto c = config(0, 2);
        c.interface_ = interface_;
        c.has_secret = secret;
        TcpTransport t(c, loop, quiet);
        return t.listen().message;
    };
    EXPECT_EQ(message("lo", false), "");
    EXPECT_EQ(message("127.0.0.1", false), "");
    EXPECT_EQ(message("", true), "");
    EXPECT(message("no-such-interface", true).find("no network interface") != std::string::npos);
    EXPECT(message("192.0.2.1", true).find("interface") != std::string::npos);  // not of this host
    EXPECT(message("192.0.2.1", false).find("secret") != std::string::npos);
    TcpTransport t(config(0, 2), loop, quiet);
    REQUIRE(t.listen().ok());
    Rank other(config(0, 2));
    EXPECT(t.start({{}, other.tcp.address()}, 1).message.find("same rank") != std::string::npos);
    loop.stop();
}

// Secrets that differ, and a rank of another job: both sides say why.
FT_TEST(tcp_transport_secrets_differ) {
    auto c0 = config(0, 2), c1 = config(1, 2);
    c0.has_secret = c1.has_secret = true;
    c0.interface_ = c1.interface_ = "127.0.0.1";
    c0.secret = Bytes(8, std::byte{1});
    c1.secret = Bytes(8, std::byte{2});
    Rank a(c0), b(c1);
    const std::vector<Bytes> blobs{a.tcp.address(), b.tcp.address()};
    a.start(blobs);
    b.start(blobs);
    EXPECT(a.wait([&] { return a.tcp.why(1).find("secret") != std::string::npos; }) || a.linked == 0);
    std::lock_guard guard(a.engine);
    EXPECT(a.tcp.unlinked().has(1));
}

}  // namespace ftcomm
