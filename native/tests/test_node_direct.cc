// All-to-all: what each has for another comes with its Enter, or when it is asked for; the rank's own part is copied in pieces.
#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

struct Exchange {
    std::vector<std::int64_t> send, recv;
    std::shared_ptr<PerRank> layout;

    // Elements to and from each rank.
    Exchange(int rank, std::vector<std::uint64_t> to, std::vector<std::uint64_t> from) {
        layout = std::make_shared<PerRank>();
        const auto lay = [](const std::vector<std::uint64_t>& counts, std::vector<std::uint64_t>* offsets) {
            std::uint64_t at = 0;
            for (auto c : counts) {
                offsets->push_back(at);
                at += c;
            }
            return at;
        };
        send.resize(lay(to, &layout->send_offsets));
        recv.resize(lay(from, &layout->recv_offsets), -1);
        layout->send_counts = std::move(to);
        layout->recv_counts = std::move(from);
        std::iota(send.begin(), send.end(), 1000 * rank);
    }
    RequestPtr post(Rig& rig, int slot) {
        OpDesc d;
        d.kind = OpKind::AllToAll;
        d.dtype = DType::Int64;
        d.send = send.data();
        d.recv = recv.data();
        d.layout = layout;
        return rig.node(slot).collective(rig.now(), Rig::kComm, d);
    }
};

bool one_done(const std::vector<RequestPtr>& requests) {
    for (const auto& r : requests)
        if (r->done) return true;
    return false;
}

std::vector<RequestPtr> post_all(Rig& rig, std::vector<Exchange>& data) {
    std::vector<RequestPtr> requests;
    for (int s : kThree) requests.push_back(data[static_cast<std::size_t>(s)].post(rig, s));
    return requests;
}

// Slot 0 does no more than it has to for the others, which do all.
void work_until_others_return(Rig& rig, const std::vector<RequestPtr>& requests) {
    for (int pieces = 0; pieces < 100 && !(requests[1]->done && requests[2]->done); ++pieces) {
        rig.settle();
        while (rig.work(1) || rig.work(2)) rig.settle();
        if (!requests[1]->done) rig.work(0);
        rig.settle();
    }
}

// What slot 0 has for itself, in several pieces, nobody waits for.
struct OwnLast {
    OwnLast() : rig(3, setup()) {
        rig.comm(kThree);
        for (int s : kThree) {
            std::vector<std::uint64_t> counts(3, 1);
            counts[static_cast<std::size_t>(s)] = s == 0 ? 40 : 1;
            data.emplace_back(s, counts, counts);
        }
        requests = post_all(rig, data);
    }
    static Rig::Setup setup() {
        Rig::Setup s;
        s.reads = true;
        return s;
    }
    void until_others_return() {
        work_until_others_return(rig, requests);
        EXPECT(requests[1]->done && requests[2]->done && !requests[0]->done && rig.node(0).has_work());
        EXPECT(data[0].recv[39] != data[0].send[39]);
    }
    void expect_all_there() {
        for (const auto& r : requests) EXPECT(r->done && r->status.ok());
        EXPECT(std::equal(data[0].send.begin(), data[0].send.begin() + 40, data[0].recv.begin()));
        EXPECT(data[0].recv[40] == 1000 && data[0].recv[41] == 2000 && data[1].recv[0] == 40 && data[2].recv[0] == 41);
    }
    Rig rig;
    std::vector<Exchange> data;
    std::vector<RequestPtr> requests;
};

}  // namespace

FT_TEST(others_return_from_an_exchange_before_a_rank_has_its_own_part) {
    OwnLast o;
    o.until_others_return();
    o.rig.go_on({0});
    o.expect_all_there();
}

// A vote calls an operation complete that somebody has returned from: who was about to copy its own part has it then.
FT_TEST(own_part_of_an_exchange_is_there_though_it_was_cut_short) {
    for (bool all_die : {false, true}) {  // then nobody is left to say that it was complete
        OwnLast o;
        o.until_others_return();
        o.rig.kill(2);
        if (all_die) o.rig.kill(1);
        else o.rig.evidence(1, 2, Evidence::Pidfd);
        for (int gone : {1, 2})
            if (all_die || gone == 2) o.rig.evidence(0, gone, Evidence::Pidfd);
        o.rig.settle();
        o.expect_all_there();
    }
}

// The same of an all-gather whose parts are read.
FT_TEST(own_block_of_an_all_gather_is_there_though_it_was_cut_short) {
    constexpr std::size_t kEach = 10000;  // more than a small one
    for (int deaths : {0, 1, 2}) {
        auto setup = OwnLast::setup();
        setup.pull_limit = 64;
        Rig rig(3, setup);
        rig.comm(kThree, Rig::kComm, Policy::Raise);
        std::vector<std::vector<std::int64_t>> in, out(3, std::vector<std::int64_t>(3 * kEach, -1));
        std::vector<RequestPtr> requests;
        for (int s : kThree) {
            auto& own = in.emplace_back(kEach);
            std::iota(own.begin(), own.end(), 100000 * s);
            OpDesc d;
            d.kind = OpKind::AllGather;
            d.dtype = DType::Int64;
            d.count = kEach;
            d.send = own.data();
            d.recv = out[static_cast<std::size_t>(s)].data();
            requests.push_back(rig.node(s).collective(rig.now(), Rig::kComm, d));
        }
        work_until_others_return(rig, requests);
        EXPECT(requests[1]->done && requests[2]->done && !requests[0]->done && out[0][0] == -1);
        for (int dead = 2; dead > 2 - deaths; --dead) rig.kill(dead);
        for (int s = 0; s < 3 - deaths; ++s)
            for (int dead = 2; dead > 2 - deaths; --dead) rig.evidence(s, dead, Evidence::Pidfd);
        rig.settle();
        if (deaths == 0) rig.go_on({0});
        for (const auto& r : requests) EXPECT(r->done && r->status.ok());
        for (const auto& got : out)
            for (std::size_t i = 0; i < got.size(); ++i)
                EXPECT_EQ(got[i], static_cast<std::int64_t>(100000 * (i / kEach) + i % kEach));
    }
}

// What is brought to a rank that expects nothing: nobody is through before that one has said so.
FT_TEST(what_nobody_expects_is_a_mismatch_for_all) {
    Rig::Setup setup;
    setup.one_host = false;
    Rig rig(3, setup);
    rig.comm(kThree);
    std::vector<Exchange> data;
    data.emplace_back(0, std::vector<std::uint64_t>{1, 1, 0}, std::vector<std::uint64_t>{1, 0, 0});
    data.emplace_back(1, std::vector<std::uint64_t>{0, 1, 0}, std::vector<std::uint64_t>{0, 1, 0});
    data.emplace_back(2, std::vector<std::uint64_t>{0, 0, 1}, std::vector<std::uint64_t>{0, 0, 1});
    rig.hold(0, 1);
    rig.hold(1, 0);
    const auto requests = post_all(rig, data);
    rig.go_on(kThree);
    EXPECT(!one_done(requests));
    rig.hold(0, 1, false);
    rig.hold(1, 0, false);
    rig.go_on(kThree);
    for (const auto& r : requests) EXPECT(r->done && r->status.code == Code::Mismatch);
}

// The root's part lies where another rank's is received.
FT_TEST(own_part_of_a_gather_is_safe_from_what_comes) {
    Rig::Setup setup;
    setup.reads = true;
    Rig rig(3, setup);
    rig.comm(kThree);
    std::vector<std::int64_t> buffer(80), others(20, -1);
    std::iota(buffer.begin(), buffer.end(), 0);
    const std::vector<std::int64_t> own(buffer.begin() + 20, buffer.begin() + 40);
    std::vector<RequestPtr> requests;
    for (int r : kThree) {
        OpDesc d;
        d.kind = OpKind::Gather;
        d.dtype = DType::Int64;
        d.count = 20;
        d.recv = r == 0 ? buffer.data() : nullptr;
        d.send = r == 0 ? buffer.data() + 20 : others.data();
        requests.push_back(rig.node(r).collective(rig.now(), Rig::kComm, d));
    }
    rig.go_on(kThree);
    for (const auto& r : requests) EXPECT(r->done && r->status.ok());
    EXPECT(std::equal(own.begin(), own.end(), buffer.begin()));
}

// It is sent.
FT_TEST(without_room_for_a_ticket_nobody_reads) {
    for (const auto& full : {std::set<int>{1}, std::set<int>{0, 1, 2}}) {
        auto setup = OwnLast::setup();
        setup.full = full;
        Rig rig(3, setup);
        rig.comm(kThree);
        std::vector<Exchange> data;
        for (int s : kThree) data.emplace_back(s, std::vector<std::uint64_t>(3, 40), std::vector<std::uint64_t>(3, 40));
        const auto requests = post_all(rig, data);
        rig.go_on(kThree);
        for (const auto& r : requests) EXPECT(r->done && r->status.ok());
        for (int s : kThree)
            for (int from : kThree)
                EXPECT(data[static_cast<std::size_t>(s)].recv[static_cast<std::size_t>(40 * from)] == 1000 * from + 40 * s);
        EXPECT(rig.traced(0, "run.direct"));
    }
}

// What is written over it could be a message for another rank, or a part of its sum.
FT_TEST(output_over_the_input_is_refused) {
    Rig rig(3);
    rig.comm(kThree);
    std::vector<std::int64_t> buffer(80);
    const auto post = [&](OpKind kind, std::size_t to, std::size_t from) {
        OpDesc d;
        d.kind = kind;
        d.dtype = DType::Int64;
        d.count = 20;
        d.root = 1;
        d.recv = buffer.data() + to;
        d.send = buffer.data() + from;
        return rig.node(1).collective(rig.now(), Rig::kComm, d);
    };
    const auto refuses = [&](const RequestPtr& r) { return r->done && r->status.code == Code::Invalid; };
    for (auto kind : {OpKind::ReduceScatter, OpKind::Scatter, OpKind::AllToAll, OpKind::Reduce}) {
        EXPECT(refuses(post(kind, 10, 0)));
        EXPECT(refuses(post(kind, 0, 10)));
    }
    EXPECT(refuses(post(OpKind::AllToAll, 0, 0)));
    for (auto kind : {OpKind::ReduceScatter, OpKind::Scatter}) {
        EXPECT(refuses(post(kind, 0, 0)));  // another rank's block
        EXPECT(!refuses(post(kind, 20, 0)));
        EXPECT(!refuses(post(kind, 60, 0)));
    }
    EXPECT(!refuses(post(OpKind::Reduce, 0, 0)));
}

}  // namespace ftcomm::unit
