// What ranks have to have in common.
#include "runtime/address.h"
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
    Address b;
    EXPECT(Address::decode(a.encode(), &b).ok());
    EXPECT(b.streams && !b.peer_memory && b.stream_limit == 5 && b.rank == 1 && b.kernel == 11);
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

}  // namespace ftcomm::unit
