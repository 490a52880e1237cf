// Who has the segment of a host has its name: however they die, there are never two.
#include "runtime/handoff.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <mutex>

#include "tests/unit.h"

namespace ftcomm {
namespace {

using Claim = HandoffGiver::Claim;

struct Member {  // a process that has the segment, or wants it
    explicit Member(const HandoffKey& key) : loop(engine), key(key), common(key.common("handoff-test", 5)) {
        REQUIRE(loop.start().ok());
        stop = ::eventfd(0, EFD_CLOEXEC);
    }
    ~Member() {
        loop.stop();
        giver.close();
        asker.close();
        got.close();
        ::close(stop);
    }
    void serve(int segment) {
        std::lock_guard guard(engine);
        REQUIRE(giver.serve(loop, key, segment, [this] { return member; }).ok());
    }
    Status ask() { return asker.ask(common.name, common.nonce, key, 1, 0, true, IoLoop::now() + 10'000'000'000, stop, &got); }
    // As a process that gets it does.
    void join() {
        REQUIRE(ask().ok());
        giver.adopt(std::exchange(got.listener, -1), common);
        serve(got.segment);
    }

    std::mutex engine;
    IoLoop loop;
    HandoffKey key;
    HandoffKey::Common common;
    HandoffGiver giver;
    HandoffAsker asker;
    handoff::Descriptors got;
    bool member = true;
    int stop = -1;
};

HandoffKey some_key() { return HandoffKey::make({}, getpid(), 7); }
int some_segment() { return ::memfd_create("handoff-test", MFD_CLOEXEC); }

}  // namespace

FT_TEST(handoff_name_is_bound_while_the_segment_is_on_its_way) {
    const int segment = some_segment();
    Member next(some_key()), other(some_key());
    {
        Member first(some_key());
        REQUIRE(first.giver.claim(first.common) == Claim::Held);
        EXPECT(other.giver.claim(other.common) == Claim::Taken);
        first.serve(segment);
        REQUIRE(next.ask().ok());
    }
    // Whoever gave it is dead, who got it does not even listen: nobody else may make another one.
    EXPECT(other.giver.claim(other.common) == Claim::Taken);
    next.got.close();
    EXPECT(other.giver.claim(other.common) == Claim::Held);
    ::close(segment);
}

FT_TEST(handoff_any_who_has_the_segment_gives_it) {
    const int segment = some_segment();
    Member second(some_key()), third(some_key()), fourth(some_key());
    {
        Member first(some_key());
        REQUIRE(first.giver.claim(first.common) == Claim::Held);
        first.serve(segment);
        second.join();
    }
    third.join();
    second.loop.stop();  // stopped, not dead: its connections would never be answered
    fourth.join();
    EXPECT(fourth.got.segment >= 0);
    ::close(segment);
}

FT_TEST(handoff_rank_that_was_voted_out_lets_go_of_the_name) {
    const int segment = some_segment();
    Member first(some_key()), next(some_key());
    REQUIRE(first.giver.claim(first.common) == Claim::Held);
    first.serve(segment);
    {
        std::lock_guard guard(first.engine);
        first.member = false;
    }
    const auto status = next.ask();
    EXPECT(!status.ok() && status.code == Code::PeerFailure);
    EXPECT(next.giver.claim(next.common) == Claim::Held);
    ::close(segment);
}

FT_TEST(handoff_needs_the_secret) {
    const int segment = some_segment();
    Member first(some_key()), stranger(HandoffKey::make({}, 1, 2));
    REQUIRE(first.giver.claim(first.common) == Claim::Held);
    first.serve(segment);
    stranger.common = first.common;
    const auto status = stranger.ask();
    EXPECT(!status.ok() && stranger.got.segment < 0);
    ::close(segment);
}

}  // namespace ftcomm
