#include "transport/shm/shm_transport.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "runtime/runtime_transport.h"
#include "tests/shm_rig.h"
#include "tests/tcp_rig.h"

namespace ftcomm {

using shm_rig::Linked;
using shm_rig::Side;

namespace {

// Something comes again and again while its reader lies down, each time it has seen the one before. False: it slept on one.
template <class Give, class Look, class LieDown>
bool wakes_each_time(Side& reader, const Give& give, const Look& look, const LieDown& lie_down) {
    constexpr std::uint64_t kTimes = 20'000;
    std::atomic<std::uint64_t> taken{0};
    std::thread other([&] {
        std::uint64_t state = 1;
        for (std::uint64_t i = 1; i <= kTimes; ++i) {
            give(i);
            while (taken.load(std::memory_order_acquire) < i) std::this_thread::yield();
            state = state * 6364136223846793005u + 1442695040888963407u;
            for (auto n = state >> 56; n > 0; --n) std::atomic_signal_fence(std::memory_order_seq_cst);
        }
    });
    auto& box = reader.instance->mailbox;
    auto& bell = box.bell[shm::kDriver - 1];
    bool missed = false;
    for (std::uint64_t seen = 0; seen < kTimes && !missed;) {
        const auto rung = bell.load(std::memory_order_acquire);
        seen = look();
        taken.store(seen, std::memory_order_release);
        lie_down();
        box.sleeper.store(shm::kDriver, std::memory_order_seq_cst);
        if (!reader.transport.has_mail() && seen < kTimes)
            missed = futex_wait(bell, rung, monotonic_ns() + 10'000'000'000) == ETIMEDOUT;
        box.sleeper.store(shm::kAwake, std::memory_order_seq_cst);
    }
    taken.store(kTimes, std::memory_order_release);
    other.join();
    return !missed;
}

}  // namespace

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

FT_TEST(frames_in_watched_rings_leave_no_word_and_are_found) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 3, 3).ok());
    Side one(segment, 0, 0), two(segment, 1, 0), late(segment, 2, 0);
    for (auto* s : {&one, &two, &late})
        for (int slot : {0, 1, 2})
            if (static_cast<int>(s->instance->slot) != slot) s->transport.attach(slot, 0);
    const auto word = [&] { return two.instance->mailbox.pending[0].load(); };
    one.say(1, 1);
    two.transport.watch(true);
    EXPECT_EQ(word(), 1u);  // it did not look yet
    EXPECT(two.transport.poll(UINT64_MAX));
    one.say(1, 2);
    EXPECT_EQ(word(), 0u);
    EXPECT(two.transport.has_mail() && two.transport.poll(UINT64_MAX) && !two.transport.has_mail());
    late.say(1, 3);  // of its ring nobody knows
    EXPECT_EQ(word(), 4u);
    EXPECT(two.transport.poll(UINT64_MAX));
    late.say(1, 4);
    EXPECT_EQ(word(), 0u);
    two.transport.watch(false);
    EXPECT_EQ(word(), 4u);
    EXPECT(two.transport.has_mail() && two.transport.poll(UINT64_MAX) && !two.transport.has_mail());
    one.say(1, 5);
    EXPECT_EQ(word(), 1u);
    EXPECT(two.transport.poll(UINT64_MAX));
    EXPECT((two.events.heard == std::vector<std::uint64_t>{1, 2, 3, 4, 5}));
}

FT_TEST(a_ring_that_is_not_read_any_more_is_not_watched) {
    Linked linked;
    auto& [segment, one, two] = linked;
    one.say(1, 1);
    two.transport.watch(true);
    two.transport.poll(UINT64_MAX);
    one.say(1, 2);
    two.transport.detach(0);
    EXPECT(!two.transport.has_mail());
    one.say(1, 3);
    EXPECT(!two.transport.has_mail());
    EXPECT_EQ(two.events.heard.size(), 1u);
}

FT_TEST(rings_of_many_peers_are_not_watched) {
    shm::Segment segment;
    REQUIRE(segment.create(1, 10, 10).ok());
    std::vector<std::unique_ptr<Side>> sides;
    for (int slot = 0; slot < 10; ++slot) sides.push_back(std::make_unique<Side>(segment, slot, 0));
    for (int slot = 1; slot < 10; ++slot) {
        sides[0]->transport.attach(slot, 0);
        sides[static_cast<std::size_t>(slot)]->transport.attach(0, 0);
    }
    auto& box = sides[0]->instance->mailbox;
    for (int slot = 1; slot < 9; ++slot) sides[static_cast<std::size_t>(slot)]->say(0, 1);
    sides[0]->transport.poll(UINT64_MAX);
    sides[0]->transport.watch(true);
    EXPECT_EQ(box.watching.load(), 1u);
    sides[1]->say(0, 2);
    sides[9]->say(0, 1);
    sides[0]->transport.poll(UINT64_MAX);
    EXPECT_EQ(box.watching.load(), 0u);
    sides[0]->transport.poll(UINT64_MAX);
    EXPECT_EQ(sides[0]->events.heard.size(), 10u);
    sides[0]->transport.watch(true);
    EXPECT_EQ(box.watching.load(), 0u);
    sides[0]->transport.detach(9);
    sides[0]->transport.watch(true);
    EXPECT_EQ(box.watching.load(), 1u);
}

// What another process may have written there: nobody spins on a frame that is none, misses one, or goes without word.
FT_TEST(scribbled_words_of_a_watched_ring_mend) {
    Linked linked;
    auto& [segment, one, two] = linked;
    one.say(1, 1);
    two.transport.watch(true);
    two.transport.poll(UINT64_MAX);
    auto* ring = segment.at<shm::Ring>(segment.inbound(two.instance, 0).load());
    ring->tail.fetch_add(64);
    EXPECT(two.transport.has_mail());
    two.transport.poll(UINT64_MAX);
    EXPECT(!two.transport.has_mail());
    one.say(1, 2);
    EXPECT(two.transport.has_mail() && two.transport.poll(UINT64_MAX));
    one.say(1, 3);
    ring->tail.store(ring->head.load());
    EXPECT(!two.transport.has_mail());  // a look with the lock finds it
    EXPECT(two.transport.poll(UINT64_MAX));
    EXPECT_EQ(two.events.heard.size(), 3u);
    two.transport.watch(false);
    two.instance->mailbox.watching.store(1);
    one.say(1, 4);
    EXPECT(!two.transport.has_mail());
    two.transport.watch(false);
    EXPECT(two.transport.has_mail() && two.transport.poll(UINT64_MAX));
    EXPECT_EQ(two.events.heard.size(), 4u);
}

// A frame comes while its reader ends its watch and lies down: either it finds the frame, or the sender finds it asleep.
FT_TEST(nobody_sleeps_on_a_frame_in_a_ring_that_it_watched) {
    Linked linked;
    auto& one = linked.one;
    auto& two = linked.two;
    const auto say = [&](std::uint64_t i) { one.say(1, i); };
    const auto look = [&] {
        two.transport.watch(true);
        two.transport.poll(UINT64_MAX);
        return two.events.heard.size();
    };
    EXPECT(wakes_each_time(two, say, look, [&] { two.transport.watch(false); }));
}

FT_TEST(watched_words_are_news_when_they_change) {
    Linked linked;
    std::array<std::atomic<std::uint64_t>, 20> words{};
    std::vector<Transport::Word> watched;
    for (auto& word : words) watched.push_back({&word, word = watched.size()});
    auto& me = linked.one.transport;
    EXPECT(!me.has_mail());
    me.watch_words(std::span(watched).first(16));
    EXPECT(!me.has_news() && !me.has_mail() && !me.overlooks());
    words[16] = 100;
    EXPECT(!me.has_news());
    words[15] = 0;
    EXPECT(!me.has_news());  // it is being written
    words[15] = 100;
    EXPECT(me.has_news() && me.has_mail());
    watched[15].seen = 100;
    me.watch_words(std::span(watched).first(16));
    EXPECT(!me.has_news());
    // Too many to look at: others leave word, and what has changed before they knew counts as left.
    watched[16].seen = 100;
    me.watch_words(watched);
    EXPECT(!me.has_news() && me.overlooks() && !me.has_mail());
    linked.two.transport.nudge(0);
    EXPECT(me.has_mail() && me.poll(1000) && !me.has_mail());
    watched[19].seen = 7;
    me.watch_words(watched);
    EXPECT(me.has_mail() && me.poll(1000));
    me.watch_words({});
    EXPECT(!me.overlooks() && !me.has_mail());
}

FT_TEST(nudge_wakes_who_sleeps_and_nobody_else) {
    Linked linked;
    auto& box = linked.one.instance->mailbox;
    const auto rung = [&](shm::Sleeper who) { return box.bell[who - 1].load(); };
    linked.two.transport.nudge(0);
    EXPECT(!linked.one.transport.has_mail());  // it is awake, and looks before it sleeps
    for (auto who : {shm::kProgress, shm::kDriver}) {
        const auto before = rung(who);
        box.sleeper.store(who);
        linked.two.transport.nudge(0);
        EXPECT(rung(who) == before + 1 && box.sleeper.load() == shm::kAwake);
        EXPECT(linked.one.transport.has_mail() && linked.one.transport.poll(1000));
    }
    // As other bells: held back, and rung later.
    linked.two.transport.hold_bells(true);
    box.sleeper.store(shm::kProgress);
    const auto before = rung(shm::kProgress);
    linked.two.transport.nudge(0);
    EXPECT(rung(shm::kProgress) == before && linked.two.transport.holds_any());
    linked.two.transport.ring_held();
    EXPECT_EQ(rung(shm::kProgress), before + 1);
    linked.two.transport.hold_bells(false);
    linked.two.transport.cut(0);
    box.sleeper.store(shm::kProgress);
    linked.two.transport.nudge(0);
    EXPECT_EQ(rung(shm::kProgress), before + 1);
}

// A word changes while who watches it lies down: either that one sees it, or who has changed it finds it asleep.
FT_TEST(nobody_sleeps_on_a_word_that_it_watched) {
    Linked linked;
    std::atomic<std::uint64_t> word{0};
    const auto change = [&](std::uint64_t i) {
        word.store(i, std::memory_order_seq_cst);
        linked.one.transport.nudge(1);
    };
    const auto look = [&] {
        linked.two.transport.poll(1000);
        const Transport::Word watched{&word, word.load()};
        linked.two.transport.watch_words({&watched, 1});
        return watched.seen;
    };
    EXPECT(wakes_each_time(linked.two, change, look, [] {}));
}

}  // namespace ftcomm
