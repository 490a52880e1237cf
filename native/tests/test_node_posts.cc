// Small operations of one host whose ranks show each other what they put in, and send nothing.
#include "tests/posts_rig.h"

namespace ftcomm::unit {
FT_TEST(small_inputs_of_one_host_are_shown_and_not_sent) {
    for (bool replay : {false, true})
        for (int ranks : {2, 3, 4, 7}) {
            Posted posted(ranks, with_posts(replay), false);
            for (int slot : posted.all) posted.add(slot);
            EXPECT(posted.under_way() > 0 && !posted.rig.traced(0, "run.flat.shown"));  // with where it will be from then on
            posted.rig.settle();
            for (std::size_t count : {1, 3, 4, 100, 512, 5})
                for (auto kind : kKinds) {
                    if (kind == OpKind::AllGather && posted.all.size() * count * 8 > 16384) continue;  // it is not small
                    for (int times = 0; times < 3; ++times) {
                        for (int slot : posted.all) posted.call(slot, kind, count);
                        EXPECT_EQ(posted.under_way(), std::size_t{0});
                        posted.rig.settle();
                        for (int slot : posted.all) EXPECT(posted.has(slot, kind));
                    }
                }
            EXPECT(posted.rig.traced(0, "run.flat.shown"));
            EXPECT_EQ(posted.rig.windows(), posted.all.size());
        }
}

FT_TEST(last_one_nudges_those_who_sleep) {
    for (int last : {0, 1, 2}) {
        Posted posted(3);
        posted.sleep_all();
        for (int slot : posted.all)
            if (slot != last) posted.add(slot);
        for (int slot : posted.all) EXPECT(!posted.rig.nudged(slot));
        posted.add(last);
        EXPECT(posted.has(last) && !posted.rig.nudged(last));
        for (int slot : posted.all) EXPECT(slot == last || (posted.rig.nudged(slot) && !posted.done(slot)));
        posted.rig.settle();
        for (int slot : posted.all) EXPECT(posted.has(slot));
    }
}

// Ranks that watch know without that; those that have seen all watch nothing.
FT_TEST(who_waits_watches_what_is_missing) {
    Posted posted(3);
    EXPECT(!posted.rig.has_news(0));
    posted.add(0);
    EXPECT(!posted.rig.has_news(0));
    posted.add(1);
    EXPECT(posted.rig.has_news(0));
    posted.rig.look(0);
    EXPECT(!posted.rig.has_news(0) && !posted.done(0));
    posted.add(2);
    EXPECT(posted.rig.has_news(0));
    posted.rig.look(0);
    EXPECT(posted.has(0) && !posted.rig.has_news(0) && !posted.rig.has_news(2));
}

// L5: what was sent before is still waiting for room, so this is sent behind it. Whoever comes after it looks, and is heard by the sleepers.
FT_TEST(nothing_is_shown_while_something_waits_for_room) {
    constexpr CommId kOther = 8;
    for (int order = 0; order < 6; ++order) {
        Posted posted(3);
        posted.sleep_all();
        posted.rig.comm({0, 1}, kOther);
        posted.rig.fill(0, 1);
        const auto before = posted.call(0, OpKind::Barrier, 1, kOther);
        const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
        for (int slot : orders[order]) posted.add(slot);
        EXPECT(!before->done && posted.rig.carries(0, 2, FrameKind::Flat) && !posted.rig.carries(1, 2, FrameKind::Flat));
        posted.rig.settle();
        EXPECT(!posted.done(1));
        posted.rig.empty(0, 1);
        posted.rig.settle();
        for (int slot : posted.all) EXPECT(posted.has(slot));
    }
}

// M10: as a frame that it has sent. And what it has not put in does not count.
FT_TEST(what_the_dead_have_shown_counts) {
    for (bool replay : {false, true})
        for (bool entered : {false, true}) {
            Posted posted(3, with_posts(replay));
            posted.sleep_all();
            if (entered) posted.add(2);
            posted.add(0);
            posted.add(1);  // it sees all that is shown
            posted.rig.sleep(0);
            EXPECT_EQ(posted.done(1), entered);
            posted.rig.kill(2);
            posted.rig.evidence(0, 2, Evidence::Pidfd);
            posted.rig.settle();
            if (entered) {
                EXPECT(posted.has(0) && posted.has(1) && !posted.rig.traced(0, "repair"));
            } else if (!replay) {
                for (int slot : {0, 1}) EXPECT(posted.done(slot) && posted.requests[static_cast<std::size_t>(slot)]->status.ok());
                EXPECT(posted.data[0] == posted.data[1] && posted.data[0][0] == 1 + 2);
            }
            EXPECT(posted.has(1) == entered || replay);
        }
}

// And where whoever was to nudge the sleeper has died, too.
FT_TEST(what_all_who_died_have_shown_counts) {
    Posted posted(3);
    posted.sleep_all();
    for (int slot : posted.all) posted.add(slot);
    EXPECT(!posted.done(0) && posted.has(2));
    posted.rig.lose_nudge(0);
    for (int slot : {1, 2}) posted.rig.kill(slot);
    for (int slot : {1, 2}) posted.rig.evidence(0, slot, Evidence::Pidfd);
    posted.rig.settle();
    EXPECT(posted.has(0));
}

// It is over for all when they begin the one after the next. Who was stopped, and is out, finds what belongs to something else in the place,
// and takes nothing.
FT_TEST(who_was_stopped_takes_nothing_of_what_came_later) {
    for (int more : {1, 2, 3, 4}) {
        Posted posted(3);
        for (int slot : posted.all) posted.rig.hold(slot, 2);
        posted.add(2);
        posted.rig.sleep(2);
        posted.rig.evidence(0, 2, Evidence::Pidfd);
        posted.rig.settle();
        for (int i = 0; i < more; ++i) {
            posted.add(0);
            posted.add(1);
            posted.rig.settle();
            EXPECT(posted.done(0) && posted.done(1));
        }
        posted.rig.look(2);
        EXPECT(!posted.done(2));
        for (int slot : posted.all) posted.rig.hold(slot, 2, false);
        posted.rig.settle();
        EXPECT(posted.done(2) && posted.requests[2]->status.code == Code::StaleEpoch);
    }
}

// The others see it there, or hear of it in two ticks: of a long scatter the root waits for a word of each.
FT_TEST(other_calls_are_noticed_where_inputs_are_shown) {
    for (auto other : {OpKind::Broadcast, OpKind::Gather, OpKind::Scatter})
        for (int odd : {0, 1, 2}) {
            Posted posted(3);
            posted.sleep_all();
            std::vector<std::int64_t> room(60'000);
            for (int slot : posted.all) {
                if (slot != odd) {
                    posted.add(slot);
                    continue;
                }
                OpDesc d;
                d.kind = other;
                d.dtype = DType::Int64;
                d.count = other == OpKind::Broadcast ? 2 : 10'000;
                d.root = odd;
                d.send = room.data();
                d.recv = other == OpKind::Broadcast ? room.data() : room.data() + 30'000;
                posted.requests[static_cast<std::size_t>(slot)] =
                    posted.rig.node(slot).collective(posted.rig.now(), Rig::kComm, d);
            }
            posted.rig.settle();
            if (other != OpKind::Broadcast) {
                for (int i = 0; i < 3; ++i) {
                    posted.rig.advance(Rig::kHeartbeat / 20);
                    posted.rig.settle();
                }
            }
            for (int slot : posted.all)
                EXPECT(posted.done(slot) && posted.requests[static_cast<std::size_t>(slot)]->status.code == Code::Mismatch);
        }
}

// Who does not come is sent what it has not come for, once; nobody else is.
FT_TEST(who_is_long_in_coming_is_sent_an_input) {
    Posted posted(3);
    for (int slot : {0, 1}) posted.add(slot);
    posted.rig.settle();
    for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(posted.under_way(), i < 2 ? std::size_t{0} : std::size_t{2});
        posted.rig.advance(Rig::kHeartbeat / 20);
    }
    EXPECT(posted.rig.carries(0, 2, FrameKind::Flat) && posted.rig.carries(1, 2, FrameKind::Flat));
    posted.rig.settle();
    posted.add(2);
    posted.rig.settle();
    for (int slot : posted.all) EXPECT(posted.has(slot));
    for (int times = 0; times < 3; ++times) posted.add_all();
}

// Its memory goes to another communicator, which is to write there: who was late for the last operation is sent what it has not seen.
FT_TEST(what_a_closed_communicator_has_shown_is_sent_to_who_is_late) {
    constexpr CommId kOther = 8;
    Posted posted(3);
    posted.sleep_all();
    posted.add(0);
    posted.add(1);
    posted.add(2);  // it has seen all
    EXPECT(posted.has(2) && !posted.done(0) && !posted.done(1));
    posted.rig.node(2).close_comm(posted.rig.now(), Rig::kComm);
    for (int slot : posted.all) posted.rig.hold(2, slot);
    posted.rig.advance(Rig::kHeartbeat / 20, {0, 1});
    EXPECT(posted.done(0) && posted.done(1));  // ticks look
    for (int slot : posted.all) posted.rig.hold(2, slot, false);
    EXPECT(posted.rig.carries(2, 0, FrameKind::Flat) && posted.rig.carries(2, 1, FrameKind::Flat));
    posted.rig.settle();
    const auto windows = posted.rig.windows();
    posted.rig.comm({1, 2}, kOther, Policy::Lossy);
    for (int slot : {1, 2}) posted.call(slot, OpKind::Barrier, 1, kOther);
    posted.rig.settle();
    EXPECT(posted.done(1) && posted.done(2));
    EXPECT_EQ(posted.rig.windows(), windows + 1);  // of rank 1, whose communicator is open
}

FT_TEST(late_rank_has_what_was_shown_in_a_closed_communicator_from_a_frame) {
    constexpr CommId kOther = 8;
    Posted posted(2);
    posted.sleep_all();
    posted.add(0);
    posted.add(1);
    EXPECT(posted.has(1) && !posted.done(0));
    posted.rig.node(1).close_comm(posted.rig.now(), Rig::kComm);
    posted.rig.tick(1);  // it rests
    posted.rig.join_comm(1, {0, 1}, kOther);
    posted.rig.join_comm(0, {0, 1}, kOther);
    // As the memory is used now: a place of the same number, and again.
    for (int i = 0; i < 2; ++i) {
        const auto late = posted.requests[0];
        const auto before = posted.data[0];
        posted.call(1, OpKind::Barrier, 1, kOther);
        EXPECT(!late->done && before == posted.data[0]);
    }
    posted.rig.settle();
    EXPECT(posted.has(0));
}

FT_TEST(without_room_for_one_rank_all_send) {
    for (int windowless : {0, 1, 2}) {
        auto setup = with_posts();
        setup.windowless = {windowless};
        Posted posted(3, setup);
        for (int times = 0; times < 3; ++times) posted.add_all();
        EXPECT(!posted.rig.traced(0, "run.flat.shown"));
    }
}

// Those left of a communicator are not all of it, and send. A newcomer does not know where the others show anything, nor they where it does.
FT_TEST(where_things_are_shown_is_told_again_when_others_take_part) {
    Posted posted(3);
    posted.rig.kill(2);
    posted.rig.evidence(0, 2, Evidence::Pidfd);
    posted.rig.settle();
    for (int slot : {0, 1}) posted.add(slot);
    posted.rig.settle();
    for (int slot : {0, 1}) posted.add(slot);
    EXPECT(posted.under_way() > 0);
    posted.rig.settle();
    posted.rig.restart(2);
    posted.rig.settle();
    for (int slot : {0, 1}) posted.rig.node(slot).admit(posted.rig.now());
    posted.rig.settle();
    posted.rig.join_comm(2, kThree);
    posted.rig.settle();
    for (int slot : posted.all) posted.add(slot);
    EXPECT(posted.rig.carries(0, 1, FrameKind::Flat) && posted.rig.carries(2, 1, FrameKind::Flat));
    posted.rig.settle();
    for (int slot : posted.all) EXPECT(posted.has(slot));
    for (int slot : posted.all) posted.add(slot);
    EXPECT_EQ(posted.under_way(), std::size_t{0});
    posted.rig.settle();
    for (int slot : posted.all) EXPECT(posted.has(slot));
}

// Under replay a process comes in while the others are in an operation: it, too, has other memory than the one before it.
FT_TEST(replacement_under_replay_shows_its_own) {
    for (bool one_is_done : {false, true}) {
        Posted posted(3, with_posts(true));
        posted.sleep_all();
        posted.add(0);
        if (one_is_done) {
            posted.add(2);
            posted.add(1);
            EXPECT(posted.done(1) && !posted.done(0));
        } else {
            posted.add(1);
        }
        posted.rig.kill(2);
        for (int slot : {0, 1}) posted.rig.evidence(slot, 2, Evidence::Pidfd);
        posted.rig.settle();
        posted.rig.restart(2);
        posted.rig.settle();
        posted.rig.join_comm(2, kThree, Rig::kComm, Policy::Replay);
        posted.rig.settle();
        posted.add(2);  // the first one again, from its log
        posted.rig.settle();
        EXPECT(posted.has(2));
        posted.add(2);
        posted.rig.settle();
        for (int slot : posted.all) EXPECT(posted.has(slot));
        for (int times = 0; times < 3; ++times) posted.add_all();
        for (int slot : posted.all) posted.add(slot);
        EXPECT_EQ(posted.under_way(), std::size_t{0});
    }
}

// It looks into nothing from then on, and others do not wake it.
FT_TEST(who_has_left_an_operation_watches_nothing) {
    for (bool halts : {false, true}) {
        Posted posted(3);
        posted.add(0);
        if (halts) posted.rig.node(0).halt();
        else posted.rig.node(0).fail_request(posted.rig.now(), posted.requests[0], Code::Timeout);
        posted.add(1);
        EXPECT(!posted.rig.has_news(0));
        posted.rig.look(0);
        EXPECT(!posted.done(0));
    }
}

// As M10, where it has said goodbye: what it has shown was before that.
FT_TEST(what_a_leaver_has_shown_comes_before_its_goodbye) {
    Posted posted(2);
    posted.sleep_all();
    posted.add(1);
    posted.add(0);
    EXPECT(posted.has(0) && !posted.done(1));
    posted.rig.lose_nudge(1);
    const auto leave = posted.rig.node(0).leave(posted.rig.now());
    for (int i = 0; i < 80 && !leave->done; ++i) {  // the other one does not run meanwhile
        posted.rig.jump(Rig::kHeartbeat / 20);
        posted.rig.tick(0);
        posted.rig.node(0).on_heard(posted.rig.now(), 1, 0);
    }
    REQUIRE(leave->done && posted.rig.carries(0, 1, FrameKind::Goodbye));
    posted.rig.settle();
    EXPECT(posted.has(1));
    EXPECT(!posted.rig.traced(1, "freeze"));
}

}  // namespace ftcomm::unit
