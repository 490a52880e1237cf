// What the other one of two ranks could read comes by the link while that is quick.
#include <algorithm>
#include <numeric>
#include <vector>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

constexpr int kMine[] = {0, 1};

struct Two {
    Two(OpKind kind, std::size_t each, bool in_place, bool only_one = false) : rig(2, setup(only_one)) {
        rig.comm({0, 1});
        for (int s : kMine) {
            const bool gathers = kind == OpKind::AllGather;
            auto& to = out.emplace_back(2 * each, -1);
            auto& own = in.emplace_back(gathers ? each : 2 * each);
            std::iota(own.begin(), own.end(), 100'000'000 * s);
            OpDesc d;
            d.kind = kind;
            d.dtype = DType::Int64;
            d.count = each;
            d.send = own.data();
            d.recv = to.data();
            if (in_place) {
                auto* part = to.data() + static_cast<std::size_t>(s) * each;
                std::copy(own.begin(), own.end(), part);
                d.send = part;
            }
            requests.push_back(rig.node(s).collective(rig.now(), Rig::kComm, d));
        }
        this->each = each;
        this->kind = kind;
    }
    static Rig::Setup setup(bool only_one) {
        Rig::Setup s;
        s.reads = s.pushes = true;
        s.only_first_pushes = only_one;
        s.pull_limit = 64;
        return s;
    }
    bool is_right(int rank) const {
        const auto& got = out[static_cast<std::size_t>(rank)];
        for (std::size_t i = 0; i < got.size(); ++i) {
            const auto skipped = kind == OpKind::AllGather ? 0 : static_cast<std::size_t>(rank) * each;
            if (got[i] != static_cast<std::int64_t>(100'000'000 * (i / each) + skipped + i % each)) return false;
        }
        return true;
    }
    Rig rig;
    OpKind kind = OpKind::AllGather;
    std::size_t each = 0;
    std::vector<std::vector<std::int64_t>> in, out;
    std::vector<RequestPtr> requests;
};

}  // namespace

FT_TEST(two_ranks_push_what_could_be_read) {
    for (const auto& [kind, in_place] :
         {std::pair{OpKind::AllGather, false}, {OpKind::AllGather, true}, {OpKind::AllToAll, false}}) {
        Two two(kind, 20'000, in_place);
        for (int s : kMine) two.rig.break_reads(s);  // none is made
        two.rig.go_on({0, 1});
        for (int s : kMine) {
            const auto& r = two.requests[static_cast<std::size_t>(s)];
            EXPECT(r->done && r->status.ok() && two.is_right(s));
        }
    }
}

// Each decides for itself.
FT_TEST(one_rank_pushes_and_the_other_one_shows) {
    for (auto kind : {OpKind::AllGather, OpKind::AllToAll}) {
        Two two(kind, 20'000, false, true);
        two.rig.break_reads(0);
        two.rig.go_on({0, 1});
        for (int s : kMine) EXPECT(two.requests[static_cast<std::size_t>(s)]->done && two.is_right(s));
    }
}

FT_TEST(two_ranks_read_what_no_cache_holds) {
    for (auto kind : {OpKind::AllGather, OpKind::AllToAll}) {
        Two two(kind, 40'000, false);
        two.rig.break_reads(1);
        two.rig.settle();
        for (int i = 0; i < 100'000 && two.rig.work(0); ++i) two.rig.settle();
        EXPECT(!two.requests[0]->done || !two.requests[0]->status.ok() || !two.is_right(0));
    }
}

// Of what was pushed before one died the other one has what has come; and it hears of the death.
FT_TEST(a_death_in_what_is_pushed_is_told) {
    Two two(OpKind::AllGather, 20'000, false);
    two.rig.kill(1);
    two.rig.evidence(0, 1, Evidence::Pidfd);
    two.rig.settle();
    two.rig.go_on({0});
    const auto& r = two.requests[0];
    EXPECT(r->done && (r->status.ok() ? two.is_right(0) : r->status.code == Code::PeerFailure));
}

}  // namespace ftcomm::unit
