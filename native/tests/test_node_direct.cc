// All-to-all: what each has for another comes with its Enter, or when it is asked for; the rank's own part is copied in pieces.
#include <algorithm>
#include <numeric>
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

}  // namespace

// A vote calls an operation complete that somebody has returned from: so nobody does before every rank has its own part, too.
FT_TEST(nobody_returns_from_an_exchange_before_all_have_their_own_part) {
    Rig::Setup setup;
    setup.reads = true;
    Rig rig(3, setup);
    rig.comm(kThree);
    std::vector<Exchange> data;
    for (int s : kThree) {  // only slot 0 has a part for itself of several pieces
        std::vector<std::uint64_t> counts(3, 1);
        counts[static_cast<std::size_t>(s)] = s == 0 ? 40 : 1;
        data.emplace_back(s, counts, counts);
    }
    const auto requests = post_all(rig, data);
    int pieces = 0;
    for (;; ++pieces) {
        rig.settle();
        while (rig.work(1) || rig.work(2)) rig.settle();
        if (!rig.node(0).has_work()) break;
        EXPECT(!one_done(requests));
        rig.work(0);
    }
    EXPECT(pieces >= 5);
    for (const auto& r : requests) EXPECT(r->done && r->status.ok());
    for (std::size_t i = 0; i < 40; ++i) EXPECT(data[0].recv[i] == data[0].send[i]);
    EXPECT(data[0].recv[40] == 1000 && data[0].recv[41] == 2000 && data[1].recv[0] == 40 && data[2].recv[0] == 41);
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
