// Memory of the host's segment: rings and windows of ranks that have died are given back, those of ranks that may live are not.
#include "tests/shm_rig.h"

namespace ftcomm {

using shm_rig::kilobytes;
using shm_rig::Linked;
using shm_rig::Side;

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

// Of what the dead have sent each other nobody else knows.
FT_TEST(shm_rings_between_the_dead_take_no_memory) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 3, 3).ok());
    Side one(segment, 0, 0);
    const auto before = kilobytes(segment);
    Side two(segment, 1, 0), three(segment, 2, 0);
    for (const auto& [from, to] : {std::pair{&one, &two}, {&one, &three}, {&two, &three}, {&three, &two}}) {
        from->transport.attach(static_cast<int>(to->instance->slot), 0);
        to->transport.attach(static_cast<int>(from->instance->slot), 0);
    }
    two.send(2, three);
    three.send(1, two);
    EXPECT(kilobytes(segment) - before > static_cast<std::int64_t>(shm::ring_capacity(3) / 1024));
    two.instance->liveness.store(FUTEX_OWNER_DIED);
    one.transport.detach(1);  // before the other death is known
    three.instance->liveness.store(FUTEX_OWNER_DIED);
    one.transport.detach(2);
    EXPECT(kilobytes(segment) - before < 64);
}

// Room in the segment is not given back: long rings would take it eight times as fast.
FT_TEST(shm_rings_are_short_in_a_segment_that_is_half_full) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 2, 2).ok());
    Side one(segment, 0, 0), two(segment, 1, 0);
    one.transport.attach(1, 0);
    REQUIRE(segment.allocate(segment.size() / 2, 4096) != 0);
    const auto used = segment.header().used.load();
    REQUIRE(one.transport.reserve(1, 8) != nullptr);
    EXPECT(segment.header().used.load() - used <= shm::ring_capacity(2, shm::kUsualRing) + 8192);
    two.transport.attach(0, 0);
    FrameHeader h{};
    h.length = 8;
    one.transport.commit(1, h);
    two.transport.poll(UINT64_MAX);
    EXPECT_EQ(two.events.bytes, std::uint64_t{8});
}

FT_TEST(shm_ring_of_a_removed_but_living_rank_keeps_its_content) {
    Linked linked;
    auto& [segment, one, two] = linked;
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

// What it had in them may be looked at still by who has not heard of the death: the tickets fall, and then the memory goes, also of what this
// rank has never looked into, and of who was only stopped when it was voted out.
FT_TEST(windows_of_the_dead_go_with_their_tickets) {
    constexpr std::size_t kBytes = 64u << 10;
    for (const bool late : {false, true}) {
        shm::Segment segment;
        REQUIRE(segment.create(1, 2, 2).ok());
        Side me(segment, 0, 0), other(segment, 1, 0);
        me.transport.attach(1, 0);
        Transport::Window windows[2];
        for (auto& window : windows) {
            window = other.transport.make_window(kBytes, Transport::Room::Any);
            REQUIRE(window.memory != nullptr);
            std::memset(window.memory + Transport::kWindowHead, 7, kBytes - Transport::kWindowHead);
            std::memset(window.memory, 7, sizeof(std::uint64_t));
        }
        EXPECT(me.transport.look(1, windows[1].place, kBytes) == windows[1].memory);
        EXPECT(me.transport.look(1, windows[1].place + 1, kBytes) == nullptr);
        EXPECT(me.transport.look(1, segment.size() - 4096, kBytes) == nullptr);
        EXPECT(me.transport.look(1, 0, kBytes) == nullptr);
        const auto pages = [&] {
            struct stat info{};
            return ::fstat(segment.fd(), &info) == 0 ? info.st_blocks / 8 : -1;
        };
        const auto before = pages();
        if (!late) other.instance->liveness.store(FUTEX_OWNER_DIED);
        me.transport.detach(1);
        if (late) {
            EXPECT_EQ(pages(), before);
            EXPECT(windows[0].memory[kBytes / 2] == std::byte{7} && windows[0].memory[0] == std::byte{7});
            other.instance->liveness.store(FUTEX_OWNER_DIED);
            me.transport.attach(1, 1);
        }
        EXPECT_EQ(pages(), before - 2 * 15);
        for (const auto& window : windows) EXPECT(window.memory[0] == std::byte{0} && window.memory[kBytes / 2] == std::byte{0});
    }
}

FT_TEST(windows_leave_room_for_links) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 2, 2).ok());
    Side me(segment, 0, 0), other(segment, 1, 0);
    me.transport.attach(1, 0);
    std::uint64_t taken = 0;
    constexpr std::size_t kBytes = 64u << 20;
    while (me.transport.make_window(kBytes, Transport::Room::Any).memory != nullptr) taken += kBytes;
    EXPECT(taken > segment.size() / 4 && taken <= segment.size() / 2);
    EXPECT(me.transport.reserve(1, 8) != nullptr);
    EXPECT(me.transport.make_window(8192, Transport::Room::Kept).memory != nullptr);
    while (segment.allocate(1u << 20, 4096) != 0) {}
    while (segment.allocate(4096, 4096) != 0) {}
    EXPECT(me.transport.make_window(8192, Transport::Room::Kept).memory == nullptr);
}

// Others may not have looked at what it holds, whoever has died.
FT_TEST(small_windows_of_the_dead_stay) {
    Linked linked;
    const auto small = linked.two.transport.make_window(Transport::kSmallWindow, Transport::Room::Any);
    const auto large = linked.two.transport.make_window(Transport::kSmallWindow + 4096, Transport::Room::Any);
    for (const auto& window : {small, large}) std::memset(window.memory + Transport::kWindowHead, 7, 9000);
    linked.two.instance->liveness.store(FUTEX_OWNER_DIED);
    linked.one.transport.detach(1);
    EXPECT(small.memory[9000] == std::byte{7} && large.memory[9000] == std::byte{0});
}

}  // namespace ftcomm
