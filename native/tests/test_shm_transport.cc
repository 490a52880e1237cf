#include "transport/shm/shm_transport.h"

#include <linux/futex.h>
#include <sys/stat.h>

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "runtime/runtime_transport.h"
#include "tests/tcp_rig.h"
#include "tests/unit.h"

namespace ftcomm {
namespace {

struct Events final : ShmEvents {
    std::uint64_t bytes = 0;
    std::vector<std::uint64_t> heard;  // sequence numbers
    std::function<void()> upcall;      // from inside the next frame
    void on_frame(int, std::uint32_t, const FrameHeader& h, ByteView payload) override {
        bytes += payload.size();
        heard.push_back(h.seq);
        if (const auto call = std::exchange(upcall, nullptr)) call();
    }
    std::vector<int> writable;
    void on_writable(int slot) override { writable.push_back(slot); }
    void on_broken(int, std::uint32_t) override {}
};

struct Side {
    Side(shm::Segment& segment, int slot, std::uint32_t incarnation)
        : instance(segment.make_instance(slot, incarnation)), transport(segment, *instance, events) {
        segment.register_instance(instance);
        instance->liveness.store(1234 | FUTEX_WAITERS);
    }
    // Fills the ring once, and the other side takes it all.
    void send(int to, Side& target) {
        const auto length = transport.max_payload();
        for (int i = 0; i < 8; ++i) {
            auto* p = transport.reserve(to, length);
            if (p == nullptr) {
                target.transport.poll(UINT64_MAX);
                p = transport.reserve(to, length);
            }
            std::memset(p, i + 1, length);
            FrameHeader h{};
            h.length = length;
            transport.commit(to, h);
        }
        target.transport.poll(UINT64_MAX);
    }

    void say(int to, std::uint64_t seq) {
        REQUIRE(transport.reserve(to, 8) != nullptr);
        FrameHeader h{};
        h.length = 8;
        h.seq = seq;
        transport.commit(to, h);
    }

    Events events;
    shm::Instance* instance;
    ShmTransport transport;
};

std::int64_t kilobytes(const shm::Segment& segment) {
    struct stat info{};
    ::fstat(segment.fd(), &info);
    return info.st_blocks / 2;
}

}  // namespace

FT_TEST(shm_rings_of_the_dead_take_no_memory) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 2, 2).ok());
    Side one(segment, 0, 0);
    std::int64_t after_first = 0;
    for (std::uint32_t incarnation = 0; incarnation < 20; ++incarnation) {
        Side two(segment, 1, incarnation);
        one.transport.attach(1, incarnation);
        two.transport.attach(0, 0);
        const auto before = one.events.bytes;
        one.send(1, two);
        two.send(0, one);
        EXPECT(two.events.bytes > 0 && one.events.bytes - before == two.events.bytes);
        if (incarnation == 0)
            EXPECT(kilobytes(segment) * 1024 >
                   static_cast<std::int64_t>(2 * shm::ring_capacity(2)) * 3 / 4);  // both rings are there
        two.instance->liveness.store(1234 | FUTEX_WAITERS | FUTEX_OWNER_DIED);
        one.transport.detach(1);
        if (incarnation == 0) after_first = kilobytes(segment);
    }
    EXPECT(kilobytes(segment) < after_first + 20 * 16);  // a few pages each: the instance and the rings' headers
}

FT_TEST(shm_ring_of_a_removed_but_living_rank_keeps_its_content) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 2, 2).ok());
    Side one(segment, 0, 0), two(segment, 1, 0);
    one.transport.attach(1, 0);
    two.transport.attach(0, 0);
    const auto length = one.transport.max_payload();
    auto* p = one.transport.reserve(1, length);
    std::memset(p, 7, length);
    FrameHeader h{};
    h.length = length;
    one.transport.commit(1, h);
    one.transport.detach(1);  // voted out, but only stopped: it may wake up and go on reading
    EXPECT(p[length / 2] == std::byte{7});
    two.transport.poll(UINT64_MAX);
    EXPECT_EQ(two.events.bytes, std::uint64_t{length});
}

// A frame that waits for a link keeps back all that come after it: without the call they would wait for ever.
FT_TEST(shm_refusal_for_want_of_a_link_is_followed_by_a_call) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 2, 2).ok());
    Side me(segment, 0, 0), other(segment, 1, 0);
    EXPECT(me.transport.reserve(1, 8) == nullptr);
    me.transport.attach(1, 0);
    me.transport.poll(UINT64_MAX);
    EXPECT(me.events.writable == std::vector<int>({1}));
    EXPECT(me.transport.reserve(1, 8) != nullptr);
    me.transport.attach(1, 1);  // not registered yet
    EXPECT(me.transport.reserve(1, 8) == nullptr);
    EXPECT(!me.transport.shares_memory(1));
    Side next(segment, 1, 1);
    EXPECT(!me.transport.shares_memory(1));  // finds it, too
    me.transport.look_for_peers();
    EXPECT(me.events.writable == std::vector<int>({1, 1}));
    EXPECT(me.transport.reserve(1, 8) != nullptr);
}

// The view that removes a rank is a frame too: what the removed one wrote before is heard from inside it, each frame once (M10).
FT_TEST(drain_from_inside_a_frame_hears_what_the_dead_has_written) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 2, 3).ok());
    Side me(segment, 0, 0), teller(segment, 1, 0), dead(segment, 2, 0);
    RuntimeTransport wires(3, &segment, &me.transport, nullptr);
    for (int slot : {1, 2}) wires.attach(slot, 0);
    teller.transport.attach(0, 0);
    dead.transport.attach(0, 0);
    teller.say(0, 1);
    teller.say(0, 5);
    for (std::uint64_t seq : {2, 3, 4}) dead.say(0, seq);
    me.events.upcall = [&] {
        wires.drain(2);
        wires.drain(1);  // whose frame this is
        wires.detach(2);
    };
    me.transport.poll(UINT64_MAX);
    EXPECT(me.events.heard == std::vector<std::uint64_t>({1, 2, 3, 4, 5}));
}

// Replacements of a host whose every process died: the view that one of them starts with has the other's predecessor, who is not in
// their new segment, and was reached by tcp if at all. Its removal must not close its successor's link.
FT_TEST(removal_of_a_rank_that_is_not_in_the_segment_keeps_its_successors_link) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 2, 2).ok());
    Side me(segment, 0, 1), other(segment, 1, 1);
    TcpConfig config;
    config.slot = 0;
    config.world_size = 2;
    rig::Rank tcp(config);
    std::lock_guard guard(tcp.engine);
    RuntimeTransport wires(2, &segment, &me.transport, &tcp.tcp);
    wires.attach(1, 1);  // from the address book
    other.transport.attach(0, 1);
    other.say(0, 1);
    me.transport.poll(UINT64_MAX);
    wires.attach(1, 0);  // from the view
    wires.detach(1);
    wires.attach(1, 1);
    other.say(0, 2);
    me.transport.poll(UINT64_MAX);
    EXPECT(me.events.heard == std::vector<std::uint64_t>({1, 2}));
}

}  // namespace ftcomm
