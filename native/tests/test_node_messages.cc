// Messages that are read out of their sender's memory, and small ones in pieces: who stops in the middle of one, and what then.
#include <algorithm>
#include <vector>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

using Numbers = std::vector<std::int64_t>;
constexpr Time kTick = Rig::kHeartbeat / 20;

Rig::Setup reading() {
    Rig::Setup setup;
    setup.reads = true;
    setup.timeout = 4 * Rig::kHeartbeat;
    return setup;
}

Numbers numbers(std::size_t count, std::int64_t first) {
    Numbers out(count);
    for (auto& n : out) n = first++;
    return out;
}

RequestPtr send(Rig& rig, int from, const Numbers& data, int to) {
    return rig.node(from).send(rig.now(), Rig::kComm, data.data(), 8 * data.size(), to, 1);
}

RequestPtr receive(Rig& rig, int at, Numbers& data, int from) {
    return rig.node(at).recv(rig.now(), Rig::kComm, data.data(), 8 * data.size(), from, 1);
}

// Rank 1 reads; until there is nothing to do for anybody.
void all_that_moves(Rig& rig) {
    do rig.settle();
    while (rig.work(1));
}

bool is_done(const RequestPtr& request, Code code = Code::Ok) { return request->done && request->status.code == code; }

// From rank 0, for which rank 1 has posted the receive, and hears of it.
struct OneMessage {
    explicit OneMessage(const Rig::Setup& setup = reading()) : rig(2, setup) {
        rig.comm({0, 1});
        receiving = receive(rig, 1, got, 0);
        sending = send(rig, 0, data, 1);
        rig.settle();
    }
    Rig rig;
    Numbers data = numbers(100, 5), got = Numbers(100);
    RequestPtr receiving, sending;
};

}  // namespace

FT_TEST(node_messages_are_read_in_parts) {
    for (const bool awaited : {true, false}) {
        Rig rig(2, reading());
        rig.comm({0, 1});
        const auto data = numbers(100, 5);  // 800 bytes: 13 parts
        Numbers got(100);
        auto receiving = awaited ? receive(rig, 1, got, 0) : nullptr;
        const auto sending = send(rig, 0, data, 1);
        rig.settle();
        if (!awaited) receiving = receive(rig, 1, got, 0);
        int parts = 1;
        while (rig.work(1)) ++parts;
        EXPECT_EQ(parts, 13);
        EXPECT(is_done(receiving) && got == data && !sending->done);
        EXPECT(!rig.carries(1, 0, FrameKind::Data) && !rig.carries(0, 1, FrameKind::Data));
        rig.settle();
        EXPECT(is_done(sending));
    }
}

// Nothing piles up in a sender whose receiver is slow: a small message is done when it is on its way.
FT_TEST(node_messages_wait_for_room) {
    Rig rig(2, reading());
    rig.comm({0, 1});
    const Numbers first = numbers(5, 1), second = numbers(1, 10), third = numbers(100, 20);
    Numbers got(5), next(1), last(100);
    const auto one = receive(rig, 1, got, 0), two = receive(rig, 1, next, 0), three = receive(rig, 1, last, 0);
    rig.fill(0, 1);
    const auto a = send(rig, 0, first, 1);  // 40 bytes: three pieces
    const auto b = send(rig, 0, second, 1);
    const auto c = send(rig, 0, third, 1);  // shown, but not before the others
    rig.settle();
    EXPECT(!a->done && !b->done && !c->done && !one->done);
    rig.empty(0, 1);
    EXPECT(a->done && b->done);
    all_that_moves(rig);
    EXPECT(is_done(one) && is_done(two) && is_done(three) && is_done(c));
    EXPECT(got == first && next == second && last == third);
}

FT_TEST(node_messages_that_find_no_room_time_out) {
    Rig rig(2, reading());
    rig.comm({0, 1});
    const Numbers first = numbers(1, 1), second = numbers(1, 2);
    Numbers got(1);
    rig.fill(0, 1);
    const auto a = send(rig, 0, first, 1);
    rig.advance(3 * Rig::kHeartbeat);
    const auto b = send(rig, 0, second, 1);
    rig.advance(2 * Rig::kHeartbeat);
    EXPECT(is_done(a, Code::Timeout) && !b->done);
    EXPECT(a->status.message.find("has not taken what was sent to it before") != std::string::npos);
    const auto receiving = receive(rig, 1, got, 0);
    rig.empty(0, 1);
    rig.settle();
    EXPECT(is_done(b) && is_done(receiving) && got == second);
    // Nothing waits any more: what comes now goes at once.
    rig.fill(0, 1);
    const auto c = send(rig, 0, first, 1);
    rig.advance(5 * Rig::kHeartbeat);
    EXPECT(is_done(c, Code::Timeout));
    rig.empty(0, 1);
    EXPECT(send(rig, 0, second, 1)->done);
}

FT_TEST(node_messages_that_find_no_room_end_with_their_receiver) {
    Rig rig(3, reading());
    rig.comm({0, 1, 2});
    const Numbers data = numbers(1, 1);
    rig.fill(0, 1);
    const auto a = send(rig, 0, data, 1), b = send(rig, 0, data, 1);
    rig.kill(1);
    rig.evidence(0, 1, Evidence::Pidfd);
    rig.settle();
    EXPECT(is_done(a, Code::PeerFailure) && is_done(b, Code::PeerFailure));
    EXPECT(send(rig, 0, data, 2)->done);
}

// Its receiver waits on for another message, whether it had begun to receive this one or not.
FT_TEST(node_messages_that_end_in_the_middle_are_not_received) {
    for (const bool awaited : {true, false}) {
        Rig rig(2, reading());
        rig.comm({0, 1});
        rig.comm({0, 1}, 8);
        const Numbers data = numbers(5, 1);
        Numbers got(5);
        auto receiving = awaited ? receive(rig, 1, got, 0) : nullptr;
        rig.fill(0, 1, 1);
        const auto sending = send(rig, 0, data, 1);
        rig.settle();
        EXPECT(!sending->done);
        rig.node(0).close_comm(rig.now(), Rig::kComm);
        EXPECT(is_done(sending, Code::Closed));
        rig.empty(0, 1);
        rig.settle();
        if (!awaited) receiving = receive(rig, 1, got, 0);
        EXPECT(!receiving->done);
        rig.advance(5 * Rig::kHeartbeat);
        EXPECT(is_done(receiving, Code::Timeout));
    }
}

FT_TEST(node_messages_go_before_a_leave) {
    Rig rig(2, reading());
    rig.comm({0, 1});
    const Numbers first = numbers(5, 1), second = numbers(1, 9);
    Numbers got(5), next(1);
    rig.fill(0, 1, 1);
    send(rig, 0, first, 1);  // whose requests nobody waits for
    send(rig, 0, second, 1);
    const auto leaving = rig.node(0).leave(rig.now());
    rig.fill(0, 1, 1);  // for the leave, of which the other one says that it may be
    rig.node(0).on_writable(rig.now(), 1);
    rig.settle();
    rig.advance(2 * kTick);
    EXPECT(!leaving->done);
    rig.empty(0, 1);
    rig.settle();
    EXPECT(leaving->done);
    EXPECT(is_done(receive(rig, 1, got, 0)) && is_done(receive(rig, 1, next, 0)) && got == first && next == second);
}

FT_TEST(node_messages_whose_receiver_stops_reading_are_done) {
    OneMessage m;
    EXPECT(m.rig.work(1) && !m.receiving->done);
    m.rig.node(1).close_comm(m.rig.now(), Rig::kComm);
    EXPECT(is_done(m.receiving, Code::Closed));
    m.rig.work(1);
    EXPECT(!m.rig.work(1));
    m.rig.settle();
    EXPECT(is_done(m.sending));  // as one that nobody reads: its buffer is the caller's again
}

FT_TEST(node_messages_are_not_read_before_their_sender_can_know) {
    Rig rig(2, reading());
    rig.comm({0, 1});
    auto data = numbers(100, 5);
    Numbers got(100);
    const auto receiving = receive(rig, 1, got, 0);
    auto sending = send(rig, 0, data, 1);
    rig.fill(1, 0);
    rig.settle();
    EXPECT(!rig.work(1) && got == Numbers(100));
    rig.advance(4 * Rig::kHeartbeat + 3 * kTick);
    EXPECT(is_done(sending, Code::Timeout));
    std::fill(data.begin(), data.end(), -1);  // the caller's again
    rig.empty(1, 0);
    all_that_moves(rig);
    EXPECT(!receiving->done);
    sending = send(rig, 0, data, 1);
    all_that_moves(rig);
    EXPECT(is_done(receiving) && got == data && is_done(sending));
}

FT_TEST(node_messages_whose_ticket_fell_are_sent) {
    Rig rig(2, reading());
    rig.comm({0, 1});
    const auto data = numbers(100, 5);
    Numbers got(100);
    rig.hold(1, 0);
    const auto receiving = receive(rig, 1, got, 0);
    const auto sending = send(rig, 0, data, 1);
    rig.settle();  // the first part is read, and on its way is that it is
    rig.jump(4 * Rig::kHeartbeat + 1);
    rig.tick(0);  // too late for the first tick
    rig.deliver_all(1, 0);
    rig.empty(0, 1);
    rig.tick(0);
    rig.tick(0);
    EXPECT(!sending->done && rig.in_flight(0, 1) == 0);
    rig.hold(1, 0, false);
    all_that_moves(rig);
    EXPECT(is_done(receiving) && got == data && is_done(sending));
}

FT_TEST(node_messages_without_room_for_a_ticket_are_sent) {
    auto setup = reading();
    setup.full = {0};
    OneMessage m(setup);
    EXPECT(!m.rig.work(1) && is_done(m.receiving) && m.got == m.data && is_done(m.sending));
}

FT_TEST(node_messages_that_are_given_up_were_not_received) {
    Rig rig(2, reading());
    rig.comm({0, 1});
    const auto data = numbers(20, 5);
    Numbers got(20);
    const auto receiving = receive(rig, 1, got, 0);
    const auto sending = send(rig, 0, data, 1);
    rig.deliver(0, 1);
    while (rig.work(1)) {}
    EXPECT(is_done(receiving) && got == data);
    rig.jump(4 * Rig::kHeartbeat + 1);  // that it was read is there, and nobody has looked
    rig.tick(0);
    rig.tick(0);
    EXPECT(is_done(sending));
}

FT_TEST(node_messages_end_with_the_node) {
    OneMessage m;
    EXPECT(!m.receiving->done);
    m.rig.node(0).halt();
    std::fill(m.data.begin(), m.data.end(), -1);  // its waiter has been told that the job is closed
    while (m.rig.work(1)) {}
    EXPECT(!m.receiving->done && !m.sending->done);
}

// What comes for a node that is closed, between its callers' being told and the end of the io thread.
FT_TEST(node_that_was_halted_hears_no_decision) {
    Rig rig(3);
    rig.comm(kThree);
    std::int64_t a = 1, b = 2;
    const auto lives = rig.sum(0, a), closed = rig.sum(1, b);
    rig.settle();
    rig.kill(2);
    for (int by : {0, 1}) rig.evidence(by, 2, Evidence::Pidfd);
    rig.hold_cells(0);
    rig.settle();
    rig.node(1).halt();
    b = -1;
    rig.hold_cells(0, false);
    rig.settle();
    EXPECT(b == -1 && !closed->done);
    EXPECT(!lives->done || !lives->status.ok());
}

FT_TEST(node_that_was_halted_receives_nothing_from_a_log) {
    Rig rig(2, Rig::replaying(false));
    rig.comm({0, 1}, Rig::kComm, Policy::Replay);
    const auto data = numbers(4000, 5);
    Numbers got(4000, 0);
    const auto receiving = receive(rig, 1, got, 0);
    rig.settle();
    rig.node(1).halt();
    send(rig, 0, data, 1);
    rig.settle();
    EXPECT(!receiving->done && got == Numbers(4000, 0));
}

// Shown or to be sent: nobody gets what its caller has had back.
FT_TEST(node_messages_that_were_cancelled_are_not_received) {
    for (const bool reads : {true, false}) {
        Rig rig(2, reads ? reading() : Rig::Setup());
        rig.comm({0, 1});
        auto data = numbers(100, 5);
        const auto cancelled = send(rig, 0, data, 1);
        rig.settle();
        rig.node(0).fail_request(rig.now(), cancelled, Code::Interrupted);
        rig.advance(Rig::kHeartbeat);
        rig.settle();
        EXPECT(is_done(cancelled, Code::Cancelled));
        std::fill(data.begin(), data.end(), -1);
        Numbers got(100);
        const auto receiving = receive(rig, 1, got, 0);
        all_that_moves(rig);
        EXPECT(!receiving->done);
        const auto next = numbers(100, 7);
        const auto sending = send(rig, 0, next, 1);
        all_that_moves(rig);
        EXPECT(is_done(receiving) && is_done(sending) && got == next);
    }
}

FT_TEST(node_messages_in_pieces_are_last_words) {
    for (const bool whole : {true, false}) {
        Rig rig(3, reading());
        rig.join_comm(0, kThree);
        rig.join_comm(2, kThree);
        const auto data = numbers(8, 5);  // small, four pieces
        EXPECT(is_done(send(rig, 0, data, 1)));
        for (int frames = whole ? 4 : 2; frames > 0; --frames) EXPECT(rig.deliver(0, 1));
        rig.hold(0, 1);
        rig.kill(0);
        for (int by : {1, 2}) rig.evidence(by, 0, Evidence::Pidfd);
        rig.settle();
        EXPECT(rig.removed(1, 0, Evidence::Pidfd) || rig.removed(2, 0, Evidence::Pidfd));
        rig.join_comm(1, kThree);  // knows of the death already
        Numbers got(8);
        const auto receiving = receive(rig, 1, got, 0);
        EXPECT(whole ? is_done(receiving) && got == data : is_done(receiving, Code::PeerFailure));
    }
}

FT_TEST(node_messages_in_pieces_from_any_are_awaited_from_another) {
    Rig rig(3, reading());
    rig.comm(kThree);
    const auto data = numbers(8, 5);
    Numbers got(8);
    const auto receiving = receive(rig, 1, got, kAny);
    send(rig, 0, data, 1);
    EXPECT(rig.deliver(0, 1) && rig.deliver(0, 1));
    rig.hold(0, 1);
    rig.kill(0);
    for (int by : {1, 2}) rig.evidence(by, 0, Evidence::Pidfd);
    rig.settle();
    EXPECT(!receiving->done && receiving->alarmed);
    const auto other = numbers(8, 50);
    send(rig, 2, other, 1);
    rig.settle();
    EXPECT(is_done(receiving) && got == other);
}

}  // namespace ftcomm::unit
