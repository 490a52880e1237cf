#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "base/crc32c.h"
#include "base/random.h"
#include "tests/unit.h"
#include "transport/tcp/session.h"

namespace ftcomm::tcp {

namespace {

constexpr std::size_t kRing = 8192;

// One direction of a connection, and the receiver's buffer behind it.
struct Pipe {
    Bytes flying, arrived;
};

struct Side {
    explicit Side(std::size_t ring) : session(ring) {}
    Session session;
    std::uint64_t posted = 0, delivered = 0;  // frames
    Pipe in;
    // Payloads that are lent, by communicator.
    struct Loan {
        std::vector<Bytes> memory;
        std::uint64_t last = 0;  // frame
    };
    std::map<std::uint64_t, Loan> lent;
    std::uint64_t comm = 1;  // of those that come next
};

Bytes content(std::uint64_t number, std::uint32_t length) {
    Bytes out(length);
    for (std::uint32_t i = 0; i < length; ++i) out[i] = static_cast<std::byte>(number * 31 + i * 7);
    return out;
}

class Harness {
public:
    explicit Harness(std::uint64_t seed) : random_(seed), a_(kRing), b_(kRing) {}

    void run(int steps) {
        reconnect();
        for (int i = 0; i < steps; ++i) {
            auto& self = random_.below(2) == 0 ? a_ : b_;
            auto& other = &self == &a_ ? b_ : a_;
            switch (random_.below(40)) {
                case 0: cut(); break;
                case 1: corrupt(self); break;
                case 2: self.session.want_ack(random_.below(2) == 0); break;
                case 3: overlap(); break;
                case 4:
                case 5:
                case 6:
                case 7:
                case 8:
                case 9:
                case 10: post(self); break;
                case 11: take_back(self, other); break;
                case 12: write_over(self, other); break;
                default: move(self, other, false); break;
            }
        }
        if (!connected_) reconnect();
        while (settle_both()) {}
        for (auto* side : {&a_, &b_})
            while (!side->lent.empty()) take_back(*side, side == &a_ ? b_ : a_);
        for (auto* side : {&a_, &b_}) side->session.want_ack(true);
        while (settle_both()) {}
        EXPECT_EQ(a_.delivered, b_.posted);
        EXPECT_EQ(b_.delivered, a_.posted);
        EXPECT(a_.session.all_acknowledged() && b_.session.all_acknowledged());
    }

    std::uint64_t resent() const { return a_.session.stats().resent + b_.session.stats().resent; }
    std::uint64_t frames() const { return a_.posted + b_.posted; }
    std::uint64_t broken() const { return a_.session.stats().broken + b_.session.stats().broken; }
    std::uint64_t duplicates() const { return a_.session.stats().duplicates + b_.session.stats().duplicates; }
    std::uint64_t refused = 0, writable = 0, outside = 0, placed = 0, lent = 0, had_come = 0;

private:
    void post(Side& s) {
        if (random_.below(4) == 0) {
            post_from(s);
            return;
        }
        if (random_.below(3) == 0) {
            lend(s);
            return;
        }
        const auto length = static_cast<std::uint32_t>(random_.below(random_.below(4) == 0 ? s.session.max_payload() + 1 : 64));
        auto* at = s.session.reserve(length);
        if (at == nullptr) {
            ++refused;
            return;
        }
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % 16, 0u);
        const auto used = length - static_cast<std::uint32_t>(random_.below(length / 8 + 1));  // less than reserved
        const auto data = content(++s.posted, used);
        if (used > 0) std::memcpy(at, data.data(), used);
        FrameHeader header;
        header.length = used;
        header.seq = s.posted;
        s.session.commit(header);
        if (random_.below(50) == 0) s.session.corrupt_last();
    }

    // Of a frame from outside.
    Bytes next_content(const Side& s) {
        return content(s.posted + 1, static_cast<std::uint32_t>(16 * (1 + random_.below(s.session.max_payload() / 16))));
    }
    static FrameHeader next_header(const Side& s, const Bytes& payload) {
        FrameHeader header;
        header.length = static_cast<std::uint32_t>(payload.size());
        header.seq = s.posted + 1;
        return header;
    }

    // What lies outside changes when nobody holds it any more.
    void post_from(Side& s) {
        auto* memory = new Bytes(next_content(s));
        const std::shared_ptr<Bytes> held(memory, [](Bytes* m) {
            std::fill(m->begin(), m->end(), std::byte{0xee});
            delete m;
        });
        std::optional<std::uint32_t> sum;
        if (random_.below(2) == 0)
            sum = crc32c(memory->data(), memory->size()) ^ static_cast<std::uint32_t>(random_.below(20) == 0);
        if (!s.session.send_from(next_header(s, *memory), {*held, held, sum})) {
            ++refused;
            return;
        }
        ++s.posted;
        ++outside;
        EXPECT(held.use_count() > 1);
        if (random_.below(50) == 0) s.session.corrupt_last();
    }

    void lend(Side& s) {
        auto memory = next_content(s);
        auto header = next_header(s, memory);
        header.comm = s.comm = s.comm + random_.below(2);
        if (!s.session.send_from(header, {memory, nullptr})) {
            ++refused;
            return;
        }
        s.lent[s.comm].memory.push_back(std::move(memory));
        s.lent[s.comm].last = ++s.posted;
        ++lent;
        if (random_.below(50) == 0) s.session.corrupt_last();
    }

    // What has come may be changed though it is lent: an input becomes the final.
    void write_over(Side& s, const Side& other) {
        for (auto& [comm, loan] : s.lent)
            if (loan.last <= other.delivered) fill(loan);
    }

    static void fill(Side::Loan& loan) {
        for (auto& memory : loan.memory) std::ranges::fill(memory, std::byte{0xee});
    }

    // Of one of them; its owner then writes there.
    void take_back(Side& s, const Side& other) {
        if (s.lent.empty()) return;
        const auto it = std::next(s.lent.begin(), static_cast<std::ptrdiff_t>(random_.below(s.lent.size())));
        const bool has_come = other.delivered >= it->second.last;
        had_come += has_come;
        s.session.take_back(it->first, has_come);
        fill(it->second);
        s.lent.erase(it);
    }

    // Writes a random amount of self's output; the other side then reads a random amount.
    bool move(Side& self, Side& other, bool all) {
        bool moved = false;
        iovec parts[3];
        const int n = self.session.gather(parts, 3);
        std::size_t total = 0;
        for (int i = 0; i < n; ++i) total += parts[i].iov_len;
        const auto amount = all ? total : random_.below(total + 1);
        std::size_t left = amount;
        for (int i = 0; i < n && left > 0; ++i) {
            const auto part = std::min(left, parts[i].iov_len);
            const auto* p = static_cast<const std::byte*>(parts[i].iov_base);
            other.in.flying.insert(other.in.flying.end(), p, p + part);
            left -= part;
        }
        if (amount > 0) self.session.wrote(amount);
        moved = amount > 0;
        return read(other, all) || moved;
    }

    bool read(Side& s, bool all) {
        const auto amount = all ? s.in.flying.size() : random_.below(s.in.flying.size() + 1);
        const auto end = s.in.flying.begin() + static_cast<std::ptrdiff_t>(amount);
        s.in.arrived.insert(s.in.arrived.end(), s.in.flying.begin(), end);
        s.in.flying.erase(s.in.flying.begin(), end);
        for (;;) {
            auto step = s.session.parse(s.in.arrived);
            Bytes place;
            if (step.kind == Session::Step::Kind::More && step.is_next && step.header.length % 16 == 0 &&
                s.in.arrived.size() + s.in.flying.size() >= step.needed && random_.below(2) == 0) {
                // The rest of it is read to another place, with what has come.
                const auto rest = s.in.flying.begin() + static_cast<std::ptrdiff_t>(step.needed - s.in.arrived.size());
                place.assign(s.in.arrived.begin() + sizeof(WireHeader), s.in.arrived.end());
                place.insert(place.end(), s.in.flying.begin(), rest);
                s.in.flying.erase(s.in.flying.begin(), rest);
                s.in.arrived.resize(sizeof(WireHeader));
                if (random_.below(50) == 0) place.back() ^= std::byte{1};
                step = s.session.parse(s.in.arrived, place);
                EXPECT(step.kind != Session::Step::Kind::More);
                ++placed;
            }
            if (step.kind == Session::Step::Kind::More) break;
            if (step.kind == Session::Step::Kind::Broken) {
                cut();
                return true;
            }
            if (step.kind == Session::Step::Kind::Frame) {
                ++s.delivered;
                EXPECT_EQ(step.header.seq, s.delivered);
                const auto expected = content(s.delivered, step.header.length);
                EXPECT(std::equal(expected.begin(), expected.end(), step.payload.begin(), step.payload.end()));
            }
            s.in.arrived.erase(s.in.arrived.begin(), s.in.arrived.begin() + static_cast<std::ptrdiff_t>(step.consumed));
        }
        writable += s.session.take_writable();
        return amount > 0;
    }

    bool settle_both() {
        const bool moved = settle(a_, b_);
        return settle(b_, a_) || moved;
    }
    bool settle(Side& self, Side& other) {
        if (!connected_) reconnect();
        return move(self, other, true);
    }

    void cut() {
        if (!connected_) return reconnect();
        connected_ = false;
        for (auto* side : {&a_, &b_}) {
            side->in = {};
            side->session.disconnected();
        }
    }

    void reconnect() {
        EXPECT(a_.session.connected(b_.session.received()));
        EXPECT(b_.session.connected(a_.session.received()));
        connected_ = true;
    }

    // A second connection replaces the first, which still carries frames after the positions were told.
    void overlap() {
        if (!connected_) return;
        const auto at_a = a_.session.received(), at_b = b_.session.received();
        for (int i = 0; i < 6 && connected_; ++i) {
            if (random_.below(2) == 0) move(a_, b_, false);
            else move(b_, a_, false);
        }
        if (connected_) cut();
        EXPECT(a_.session.connected(at_b));
        EXPECT(b_.session.connected(at_a));
        connected_ = true;
    }

    void corrupt(Side& s) {
        if (s.in.flying.empty()) return;
        s.in.flying[random_.below(s.in.flying.size())] ^= static_cast<std::byte>(1 + random_.below(255));
    }

    Random random_;
    Side a_, b_;
    bool connected_ = false;
};

}  // namespace

FT_TEST(tcp_session_exactly_once_in_order) {
    std::uint64_t frames = 0, resent = 0, broken = 0, duplicates = 0, refused = 0, writable = 0;
    std::uint64_t outside = 0, placed = 0, lent = 0, had_come = 0;
    for (std::uint64_t seed = 1; seed <= 400; ++seed) {
        Harness h(seed);
        h.run(1500);
        frames += h.frames();
        resent += h.resent();
        broken += h.broken();
        duplicates += h.duplicates();
        refused += h.refused;
        writable += h.writable;
        outside += h.outside;
        placed += h.placed;
        lent += h.lent;
        had_come += h.had_come;
    }
    // The harness reached what it is for.
    EXPECT(frames > 10000);
    EXPECT(resent > 100);
    EXPECT(broken > 100);
    EXPECT(duplicates > 10);
    EXPECT(refused > 100);
    EXPECT(writable > 100);
    EXPECT(outside > 1000);
    EXPECT(placed > 100);
    EXPECT(lent > 1000);
    EXPECT(had_come > 100);
}

// The peer has said where it is, has then got the frame over the connection before, and is sent it again: what goes on when its owner takes it
// back, as it knows that it has come, is a copy.
FT_TEST(tcp_session_takes_back_what_it_sends_again) {
    Session sender(kRing), receiver(kRing);
    sender.connected(0);
    receiver.connected(0);
    Bytes memory = content(1, 1024);
    FrameHeader header;
    header.length = 1024;
    header.comm = 7;
    REQUIRE(sender.send_from(header, {memory, nullptr}));
    const auto wire = [&] {
        iovec parts[2];
        REQUIRE(sender.gather(parts, 2) == 2 && parts[1].iov_base == memory.data());
        const auto* head = static_cast<const std::byte*>(parts[0].iov_base);
        Bytes out(head, head + parts[0].iov_len);
        out.insert(out.end(), memory.begin(), memory.end());
        return out;
    };
    EXPECT(receiver.parse(wire()).kind == Session::Step::Kind::Frame);
    sender.wrote(sizeof(WireHeader) + memory.size());
    sender.disconnected();
    receiver.disconnected();
    sender.connected(0);
    receiver.connected(0);
    auto again = wire();
    sender.wrote(again.size() / 2);
    sender.take_back(7, true);
    std::fill(memory.begin(), memory.end(), std::byte{0xee});
    iovec rest;
    REQUIRE(sender.gather(&rest, 1) == 1);
    EXPECT_EQ(rest.iov_len, again.size() - again.size() / 2);
    EXPECT(std::memcmp(rest.iov_base, again.data() + again.size() / 2, rest.iov_len) == 0);
    EXPECT(receiver.parse(again).kind == Session::Step::Kind::Nothing);
    again.back() ^= std::byte{1};  // its owner had changed it before the rest was sent again
    EXPECT(receiver.parse(again).kind == Session::Step::Kind::Nothing);
    sender.wrote(rest.iov_len);
    EXPECT(sender.all_acknowledged() && !sender.wants_write());
}

FT_TEST(tcp_session_refuses_nonsense) {
    Session s(kRing);
    EXPECT(!s.connected(5));  // nothing was ever sent
    EXPECT(s.connected(0));
    const auto broken = [&](auto change) {
        Session sender(kRing), receiver(kRing);
        sender.connected(0);
        receiver.connected(0);
        FrameHeader header;
        header.length = 40;
        std::memset(sender.reserve(40), 7, 40);
        sender.commit(header);
        iovec part;
        REQUIRE(sender.gather(&part, 1) == 1);
        Bytes wire(static_cast<std::byte*>(part.iov_base), static_cast<std::byte*>(part.iov_base) + part.iov_len);
        change(wire);
        EXPECT(receiver.parse(wire).kind == Session::Step::Kind::Broken);
        EXPECT_EQ(receiver.received(), 0u);
    };
    broken([](Bytes& w) { w[0] ^= std::byte{1}; });
    broken([](Bytes& w) { w[w.size() - 1] ^= std::byte{1}; });  // padding, too
    broken([](Bytes& w) { w[85] ^= std::byte{0x80}; });
    for (std::size_t i = 0; i < sizeof(WireHeader); ++i) broken([i](Bytes& w) { w[i] ^= std::byte{4}; });
}

FT_TEST(tcp_session_gap_breaks) {
    Session sender(kRing), receiver(kRing);
    sender.connected(0);
    receiver.connected(0);
    for (int i = 0; i < 2; ++i) {
        REQUIRE(sender.reserve(0) != nullptr);
        sender.commit(FrameHeader{});
    }
    iovec part;
    REQUIRE(sender.gather(&part, 1) == 1 && part.iov_len == 2 * sizeof(WireHeader));
    const ByteView both(static_cast<std::byte*>(part.iov_base), part.iov_len);
    EXPECT(receiver.parse(both.subspan(sizeof(WireHeader))).kind == Session::Step::Kind::Broken);
    EXPECT(receiver.parse(both).kind == Session::Step::Kind::Frame);
}

FT_TEST(tcp_session_largest_frame_fits_an_idle_link) {
    Session s(1u << 20);
    s.connected(0);
    for (int i = 0; i < 20; ++i) {
        auto* at = s.reserve(s.max_payload());
        REQUIRE(at != nullptr);
        std::memset(at, i, s.max_payload());
        FrameHeader header;
        header.length = s.max_payload();
        s.commit(header);
        iovec part;
        while (s.gather(&part, 1) > 0) s.wrote(part.iov_len);
        s.disconnected();
        EXPECT(s.connected(static_cast<std::uint64_t>(i) + 1));
        EXPECT(s.all_acknowledged());
    }
}

}  // namespace ftcomm::tcp
