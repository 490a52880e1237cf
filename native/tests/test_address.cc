// What ranks have to have in common.
#include "runtime/address.h"
#include "runtime/host.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

Address at(int rank) {
    Address a;
    a.job = 7;
    a.world_size = 2;
    a.rank = rank;
    a.kernel = 11;
    return a;
}

}  // namespace

FT_TEST(an_address_comes_back_as_it_was) {
    auto a = at(1);
    a.streams = true;
    a.peer_memory = false;
    a.stream_limit = 5;
    a.stage_limit = 6;
    a.post_limit = 7;
    Address b;
    EXPECT(Address::decode(a.encode(), &b).ok());
    EXPECT(b.streams && !b.peer_memory && b.stream_limit == 5 && b.stage_limit == 6 && b.post_limit == 7 && b.rank == 1 &&
           b.kernel == 11);
}

// One that survives a boot is looked for after it; what is in memory goes with it, and so do the ranks.
FT_TEST(log_of_a_host_has_the_same_owner_after_a_boot) {
    const auto before = identify_host("one", "node", ""), after = identify_host("two", "node", "");
    EXPECT(before.host != after.host);
    EXPECT_EQ(log_owner(before, true), log_owner(after, true));
    EXPECT(log_owner(before, false) != log_owner(after, false));
    EXPECT(log_owner(before, true) != log_owner(identify_host("one", "other", ""), true));
    const auto named = identify_host("one", "node", "mine");
    EXPECT(log_owner(named, true) == log_owner(named, false) && named.host == identify_host("two", "other", "mine").host);
}

FT_TEST(ranks_of_one_machine_stream_or_do_not) {
    auto a = at(0), b = at(1);
    EXPECT(a.check_agrees(b, 1).ok());
    b.streams = true;
    const auto status = a.check_agrees(b, 1);
    EXPECT(status.code == Code::Mismatch && status.ranks == std::vector<int>{1});
    EXPECT(status.message.find("FTCOMM_STREAM_LIMIT=1099511627776") != std::string::npos);
    b.kernel = 12;  // a machine of another maker
    EXPECT(a.check_agrees(b, 1).ok());
}

FT_TEST(a_machine_is_crowded_where_one_rank_has_no_processor_of_its_own) {
    std::vector<Address> all(4);
    for (int r = 0; r < 4; ++r) {
        all[static_cast<std::size_t>(r)] = at(r);
        all[static_cast<std::size_t>(r)].processors = RankSet::first(4);
    }
    EXPECT(!is_crowded(all));
    all[1].processors = RankSet::only(2);  // the others leave it to this one
    EXPECT(!is_crowded(all));
    all[2].processors = RankSet::only(2);
    EXPECT(is_crowded(all) && !has_own_processor(all[1], all));
    all[2].kernel = 12;  // the number of another machine's processor, if there may be another one
    EXPECT(is_crowded(all));
    for (auto& a : all) a.has_secret = true;
    EXPECT(!is_crowded(all));
    all[2].kernel = 11;
    EXPECT(is_crowded(all));
    all[3].host = 5;
    EXPECT(!is_crowded(all));
    all[3] = {};  // has left before
    EXPECT(is_crowded(all));
    for (auto& a : all) a.processors = RankSet::only(a.rank);
    all[3] = all[2];
    all[3].rank = 3;
    all[3].processors = RankSet::only(3);
    EXPECT(!is_crowded(all));
    for (int r = 0; r < 4; ++r) all[static_cast<std::size_t>(r)].processors = RankSet::first(r == 0 ? 2 : 3);  // together too few
    EXPECT(is_crowded(all));
}

}  // namespace ftcomm::unit
