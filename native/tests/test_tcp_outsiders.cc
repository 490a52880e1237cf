// Those who should not be connected: strangers, other jobs, wrong configurations.
#include <sys/socket.h>
#include <unistd.h>

#include "base/random.h"
#include "tests/tcp_rig.h"
#include "transport/tcp/addresses.h"
#include "transport/tcp/handshake.h"

namespace ftcomm {

using namespace rig;

namespace {

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
    while (::recv(fd, sink, sizeof sink, 0) > 0) {}
}

}  // namespace

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
                data = {std::byte{0x43}, std::byte{0x4f}, std::byte{0x4d}, std::byte{0x48},
                        std::byte{1},    std::byte{0},    std::byte{255},  std::byte{255}};  // an oversized frame
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
    EXPECT(a.wait([&] { return a.tcp.why(1).find("secret") != std::string::npos || a.linked > 0; }));
    EXPECT(b.wait([&] { return b.log.find("secret") != std::string::npos || b.linked > 0; }));
    std::lock_guard guard(a.engine);
    EXPECT_EQ(a.linked, 0);
    EXPECT(a.tcp.unlinked().has(1));
}

}  // namespace ftcomm
