// What of a small operation is shown, and what is sent all the same.
#include <tuple>

#include "tests/posts_rig.h"

namespace ftcomm::unit {

// What is longer than a place is sent, and in turn with what is shown.
FT_TEST(inputs_that_are_too_long_are_sent) {
    auto setup = with_posts();
    setup.max_payload = 8192;
    Posted posted(3, setup);
    for (int times = 0; times < 3; ++times) {
        for (int slot : posted.all) posted.call(slot, OpKind::Broadcast, 513);
        EXPECT_EQ(posted.under_way(), std::size_t{2});  // the others of a broadcast have none
        posted.rig.settle();
        for (int slot : posted.all) EXPECT(posted.has(slot, OpKind::Broadcast));
        posted.add_all();
    }
}

FT_TEST(what_is_longer_than_the_limit_is_sent) {
    for (std::uint64_t limit : {8, 100}) {
        auto setup = with_posts();
        setup.post_limit = limit;
        Posted posted(3, setup);
        for (std::size_t count : {1, 2, 12, 13}) {
            for (int slot : posted.all) posted.add(slot, count);
            EXPECT_EQ(posted.under_way() == 0, count * 8 <= limit);
            posted.rig.settle();
            for (int slot : posted.all) EXPECT(posted.has(slot));
        }
    }
}

// A place has room for 16 KiB; of what one alone gets, half of that is shown.
FT_TEST(what_one_other_gets_is_shown_up_to_less) {
    auto setup = with_posts();
    setup.post_limit = 16384;
    setup.max_payload = 65536;
    for (auto [kind, most] : {std::tuple(OpKind::AllReduce, 2048), std::tuple(OpKind::AllGather, 2048),
                              std::tuple(OpKind::Broadcast, 1024), std::tuple(OpKind::Reduce, 1024)}) {
        Posted posted(2, setup);
        for (int count : {most, most + 1}) {
            for (int slot : posted.all) posted.call(slot, kind, static_cast<std::size_t>(count));
            EXPECT_EQ(posted.under_way() == 0, count == most);
            posted.rig.settle();
            for (int slot : posted.all) EXPECT(kind == OpKind::Reduce ? posted.done(slot) : posted.has(slot, kind));
        }
    }
}

// More than four that share processors: what all get from one place goes straight, and sums that would all be added up by all along a tree.
FT_TEST(many_that_share_processors_look_at_what_is_little) {
    auto setup = with_posts();
    setup.crowded = true;
    for (auto [kind, count, straight] : {std::tuple(OpKind::AllReduce, 256, true), std::tuple(OpKind::AllReduce, 257, false),
                                         std::tuple(OpKind::AllGather, 64, true), std::tuple(OpKind::Barrier, 0, true)}) {
        Posted posted(6, setup);
        EXPECT(posted.rig.traced(0, "run.flat.many") && !posted.rig.traced(0, "run.tree"));
        for (int slot : posted.all) posted.call(slot, kind, static_cast<std::size_t>(count));
        EXPECT_EQ(posted.under_way() == 0, straight);
        posted.rig.settle();
        EXPECT_EQ(posted.rig.traced(0, "run.tree"), !straight);
        for (int slot : posted.all) EXPECT(posted.has(slot, kind));
    }
}

// Without a limit, between hosts, and of so many that each would look at too many.
FT_TEST(where_nothing_is_shown_nobody_makes_room_for_it) {
    auto none = with_posts(), apart = with_posts();
    none.post_limit = 0;
    apart.near = false;
    for (const auto& setup : {none, apart}) {
        Posted posted(3, setup);
        for (auto kind : kKinds) {
            for (int slot : posted.all) posted.call(slot, kind);
            EXPECT(posted.under_way() > 0);
            posted.rig.settle();
            for (int slot : posted.all) EXPECT(posted.has(slot, kind));
        }
        EXPECT_EQ(posted.rig.windows(), std::size_t{0});
    }
    Posted many(9, with_posts(), false);
    std::vector<std::vector<std::uint8_t>> bytes(9, std::vector<std::uint8_t>(2048, 1));  // as sums in float32 they fit no tree
    for (int times = 0; times < 2; ++times) {
        for (int slot : many.all) {
            OpDesc d;
            d.kind = OpKind::AllReduce;
            d.dtype = DType::UInt8;
            d.op = ReduceOp::Max;
            d.count = 2048;
            d.recv = bytes[static_cast<std::size_t>(slot)].data();
            many.requests[static_cast<std::size_t>(slot)] = many.rig.node(slot).collective(many.rig.now(), Rig::kComm, d);
        }
        EXPECT_EQ(many.under_way(), std::size_t{72});
        many.rig.settle();
        for (int slot : many.all) EXPECT(many.done(slot));
    }
    EXPECT(many.rig.traced(0, "run.flat") && many.rig.windows() == 0);
}

// L5: what their receives were told is on its way to who cannot read it in their logs, and has to be heard before what follows from it.
FT_TEST(under_replay_with_several_hosts_all_is_sent) {
    auto setup = with_posts(true);
    setup.one_host = false;
    Posted posted(3, setup);
    for (int times = 0; times < 3; ++times) {
        for (int slot : posted.all) posted.add(slot);
        EXPECT(posted.under_way() > 0);
        posted.rig.settle();
        for (int slot : posted.all) EXPECT(posted.has(slot));
    }
}

}  // namespace ftcomm::unit
