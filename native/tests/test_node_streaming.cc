// Links that are written past the caches carry the same bits as others.
#include <cstring>

#include "base/random.h"
#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {
namespace {

constexpr std::size_t kBytes = 100'000;  // segments of several blocks of 8 KiB, and parts of lines at their ends

std::vector<Bytes> all_reduce(int ranks, DType dtype, ReduceOp op, std::uint64_t count, std::uint64_t stream_limit) {
    Rig::Setup setup;
    setup.max_payload = 60'000;
    setup.stream_limit = stream_limit;
    Rig rig(ranks, setup);
    std::vector<int> slots;
    for (int s = 0; s < ranks; ++s) slots.push_back(s);
    rig.comm(slots);
    std::vector<Bytes> buffers;
    Random random(7);
    for (int s = 0; s < ranks; ++s) {
        auto& b = buffers.emplace_back(kBytes);
        for (auto& byte : b) byte = static_cast<std::byte>(random() & 0x3f);  // small finite numbers of every type
    }
    std::vector<RequestPtr> requests;
    for (int s : slots) {
        OpDesc d;
        d.kind = OpKind::AllReduce;
        d.dtype = dtype;
        d.op = op;
        d.factor = 0.37;
        d.count = count;
        d.algorithm = Algorithm::Ring;
        d.recv = buffers[static_cast<std::size_t>(s)].data() + 4;  // not at the beginning of a line
        d.send = d.recv;
        requests.push_back(rig.node(s).collective(rig.now(), Rig::kComm, d));
    }
    rig.settle();
    for (const auto& r : requests) EXPECT(r->done && r->status.ok());
    const auto bytes = count * size_of(dtype);
    for (const auto& b : buffers) EXPECT(std::memcmp(b.data() + 4, buffers[0].data() + 4, bytes) == 0);
    return buffers;
}

}  // namespace

FT_TEST(sums_through_links_past_the_caches_have_the_same_bits) {
    struct Case {
        DType dtype;
        ReduceOp op;
        std::uint64_t count;
    };
    for (const auto& c : {Case{DType::Float32, ReduceOp::Sum, 24'001}, Case{DType::Float32, ReduceOp::PremulSum, 24'001},
                          Case{DType::Float16, ReduceOp::Avg, 49'003}, Case{DType::Int8, ReduceOp::Max, 99'001},
                          Case{DType::Complex128, ReduceOp::Sum, 6'001}})
        for (int ranks : {2, 3, 4}) {
            const auto usual = all_reduce(ranks, c.dtype, c.op, c.count, kNeverStreams);
            const auto streamed = all_reduce(ranks, c.dtype, c.op, c.count, 4096);
            EXPECT(usual == streamed);
        }
}

}  // namespace ftcomm::unit
