#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "tests/unit.h"
#include "transport/tcp/addresses.h"
#include "transport/tcp/handshake.h"

namespace ftcomm::tcp {

namespace {

Digest challenge(int seed) {
    Digest d;
    d.fill(static_cast<std::byte>(seed));
    return d;
}

Identity identity(std::uint32_t slot) {
    Identity id;
    id.job = 11;
    id.boot = 12;
    id.world_size = 4;
    id.slot = slot;
    id.host = 100 + slot;
    id.process = 1000 + slot;
    id.address = Bytes(30, std::byte{9});
    return id;
}

Digest key(const std::string& secret = "secret") {
    return handshake_key(std::as_bytes(std::span(secret.data(), secret.size())), "job", 5);
}

struct Pair {
    explicit Pair(Identity d = identity(0), Identity a = identity(1), Digest dk = key(), Digest ak = key(),
                  Target t = {1, 0, 1001})
        : dialer(Handshake::dialer(std::move(d), dk, challenge(1), t)),
          acceptor(Handshake::acceptor(std::move(a), ak, challenge(2))) {}

    // Lets messages pass, `piece` bytes at a time; everything that was sent is kept.
    void pump(std::size_t piece = 1000000) {
        for (bool moved = true; moved;) {
            moved = pass(dialer, acceptor, from_dialer, piece);
            moved |= pass(acceptor, dialer, from_acceptor, piece);
            if (dialer.state() == Handshake::State::Confirm) dialer.confirm(7, 70), moved = true;
            if (acceptor.state() == Handshake::State::Confirm) acceptor.confirm(acceptor.generation(), 80), moved = true;
        }
    }
    static bool pass(Handshake& from, Handshake& to, Bytes& log, std::size_t piece) {
        const auto out = from.take_output();
        log.insert(log.end(), out.begin(), out.end());
        for (std::size_t i = 0; i < out.size(); i += piece) {
            const auto part = std::min(piece, out.size() - i);
            to.feed(ByteView(out).subspan(i, part));
        }
        return !out.empty();
    }
    bool both_done() const { return dialer.state() == Handshake::State::Done && acceptor.state() == Handshake::State::Done; }

    Handshake dialer, acceptor;
    Bytes from_dialer, from_acceptor;
};

}  // namespace

FT_TEST(tcp_handshake_agrees) {
    for (std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{100000}}) {
        Pair p;
        p.pump(piece);
        REQUIRE(p.both_done());
        EXPECT_EQ(p.acceptor.peer().slot, 0u);
        EXPECT_EQ(p.dialer.peer().process, 1001u);
        EXPECT_EQ(p.acceptor.generation(), 7u);
        EXPECT_EQ(p.acceptor.peer_received(), 70u);
        EXPECT_EQ(p.dialer.peer_received(), 80u);
        EXPECT(p.acceptor.peer().address == Bytes(30, std::byte{9}));
    }
}

FT_TEST(tcp_handshake_leaves_session_bytes) {
    Pair p;
    Pair::pass(p.dialer, p.acceptor, p.from_dialer, 10000);
    Pair::pass(p.acceptor, p.dialer, p.from_acceptor, 10000);
    p.dialer.confirm(1, 0);
    Pair::pass(p.dialer, p.acceptor, p.from_dialer, 10000);
    p.acceptor.confirm(1, 0);
    auto out = p.acceptor.take_output();
    const auto handshake = out.size();
    out.resize(out.size() + 50, std::byte{3});
    EXPECT_EQ(p.dialer.feed(out), handshake);
    EXPECT(p.dialer.state() == Handshake::State::Done);
}

FT_TEST(tcp_handshake_rejects) {
    const auto rejected = [](Pair p, Reject why, const char* word) {
        p.pump();
        EXPECT(!p.both_done());
        EXPECT(p.dialer.state() == Handshake::State::Failed && p.acceptor.state() == Handshake::State::Failed);
        EXPECT_EQ(p.dialer.reason(), why);
        EXPECT_EQ(p.acceptor.reason(), why);
        EXPECT(p.dialer.text().find(word) != std::string::npos);
    };
    rejected(Pair(identity(0), identity(1), key("one"), key("two")), Reject::Denied, "secret");
    rejected(Pair(identity(0), identity(1), key(), key(), {2, 0, 0}), Reject::Stranger, "does not live here");
    rejected(Pair(identity(0), identity(1), key(), key(), {1, 1, 0}), Reject::Stranger, "does not live here");
    rejected(Pair(identity(0), identity(1), key(), key(), {1, 0, 77}), Reject::Stranger, "does not live here");
    rejected(Pair(identity(1), identity(1)), Reject::Incompatible, "cannot be a peer");
    rejected(Pair(identity(9), identity(1)), Reject::Incompatible, "cannot be a peer");
    auto other = identity(0);
    other.job = 99;
    rejected(Pair(other), Reject::Incompatible, "another job");
    other = identity(0);
    other.boot = 99;
    rejected(Pair(other), Reject::Incompatible, "another job");
    other = identity(0);
    other.world_size = 5;
    rejected(Pair(other), Reject::Incompatible, "world size");
}

FT_TEST(tcp_handshake_owner_rejects) {
    Pair p;
    Pair::pass(p.dialer, p.acceptor, p.from_dialer, 10000);
    Pair::pass(p.acceptor, p.dialer, p.from_acceptor, 10000);
    p.dialer.confirm(1, 0);
    Pair::pass(p.dialer, p.acceptor, p.from_dialer, 10000);
    REQUIRE(p.acceptor.state() == Handshake::State::Confirm);
    p.acceptor.reject(Reject::Superseded, "newer\x01\n", 42);
    Pair::pass(p.acceptor, p.dialer, p.from_acceptor, 10000);
    EXPECT(p.dialer.state() == Handshake::State::Failed && p.dialer.rejected_by_peer());
    EXPECT_EQ(p.dialer.generation(), 42u);
    EXPECT_EQ(p.dialer.text(), std::string("newer??"));
}

// A recorded conversation is worthless: the other side's challenge is new.
FT_TEST(tcp_handshake_replay) {
    Pair recorded;
    recorded.pump();
    REQUIRE(recorded.both_done());
    auto acceptor = Handshake::acceptor(identity(1), key(), challenge(3));
    acceptor.feed(recorded.from_dialer);
    EXPECT(acceptor.state() == Handshake::State::Failed);
    EXPECT_EQ(acceptor.reason(), Reject::Denied);
    auto dialer = Handshake::dialer(identity(0), key(), challenge(4), {1, 0, 1001});
    dialer.feed(recorded.from_acceptor);
    EXPECT(dialer.state() == Handshake::State::Failed);
    // Nor can an acceptor be made to prove itself with its own words.
    auto mirror = Handshake::dialer(identity(0), key(), challenge(1), {1, 0, 1001});
    const auto own = mirror.take_output();
    mirror.feed(own);
    EXPECT(mirror.state() == Handshake::State::Failed);
}

FT_TEST(tcp_handshake_garbage) {
    Random random(3);
    Pair recorded;
    recorded.pump();
    for (int round = 0; round < 3000; ++round) {
        auto acceptor = Handshake::acceptor(identity(1), key(), challenge(round % 250));
        Bytes data;
        if (round % 2 == 0) {
            data.resize(random.below(6000));
            for (auto& b : data) b = static_cast<std::byte>(random.below(256));
        } else {
            data = recorded.from_dialer;
            for (std::uint64_t i = 0; i <= random.below(3); ++i) {
                data[random.below(data.size())] = static_cast<std::byte>(random.below(256));
            }
            data.resize(random.below(data.size() + 1));
        }
        const auto consumed = acceptor.feed(data);
        EXPECT(consumed <= data.size());
        EXPECT(acceptor.state() == Handshake::State::Failed || acceptor.state() == Handshake::State::Waiting);
    }
    // A length beyond the bound ends it before the body is there.
    auto acceptor = Handshake::acceptor(identity(1), key(), challenge(1));
    Bytes oversized(recorded.from_dialer.begin(), recorded.from_dialer.begin() + 8);
    oversized[6] = oversized[7] = std::byte{0xff};
    acceptor.feed(oversized);
    EXPECT(acceptor.state() == Handshake::State::Failed);
}

FT_TEST(tcp_address_blob) {
    AddressBlob blob;
    blob.slot = 3;
    blob.incarnation = 2;
    blob.host = 5;
    blob.process = 6;
    Address v4, v6;
    v4.ip[0] = std::byte{127};
    v4.ip[3] = std::byte{1};
    v4.port = 80;
    v6.v6 = true;
    v6.ip[15] = std::byte{1};
    v6.port = 81;
    blob.addresses = {v4, v6};
    EXPECT_EQ(v4.text(), std::string("127.0.0.1:80"));
    EXPECT_EQ(v6.text(), std::string("[::1]:81"));
    EXPECT(v4.is_loopback() && v6.is_loopback());
    const auto encoded = blob.encode();
    AddressBlob back;
    EXPECT(AddressBlob::decode(encoded, &back).ok());
    EXPECT(back.addresses == blob.addresses && back.slot == 3 && back.incarnation == 2 && back.process == 6);
    for (std::size_t n = 0; n < encoded.size(); ++n) EXPECT(!AddressBlob::decode(ByteView(encoded).first(n), &back).ok());
    Random random(1);
    for (int i = 0; i < 2000; ++i) {
        auto broken = encoded;
        broken[random.below(broken.size())] = static_cast<std::byte>(random.below(256));
        AddressBlob::decode(broken, &back);  // sanitizers watch
        EXPECT(back.addresses.size() <= kMaxAddresses);
    }
}

}  // namespace ftcomm::tcp
