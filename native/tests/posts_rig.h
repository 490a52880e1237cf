// Ranks of one host that show each other what they put into small operations.
#pragma once

#include <numeric>
#include <vector>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

inline Rig::Setup with_posts(bool replay = false) {
    Rig::Setup s;
    s.near = true;
    s.replay = replay;
    s.post_limit = 4096;
    return s;
}

struct Posted {
    Rig rig;
    std::vector<int> all;
    std::vector<std::vector<std::int64_t>> data;
    std::vector<RequestPtr> requests;

    // `known`: where each shows what it puts in is known to all.
    explicit Posted(int ranks, Rig::Setup setup = with_posts(), bool known = true)
        : rig(ranks, setup), all(static_cast<std::size_t>(ranks)), data(all.size()), requests(all.size()) {
        std::iota(all.begin(), all.end(), 0);
        rig.comm(all, Rig::kComm, setup.replay ? Policy::Replay : Policy::Lossy);
        if (known) add_all();
    }
    RequestPtr call(int slot, OpKind kind, std::size_t count = 1, CommId comm = Rig::kComm) {
        auto& mine = data[static_cast<std::size_t>(slot)];
        mine.assign(count * (kind == OpKind::AllGather ? all.size() : 1), 0);
        const auto at = kind == OpKind::AllGather ? static_cast<std::size_t>(slot) * count : 0;
        for (std::size_t i = 0; i < count; ++i) mine[at + i] = input(slot, i);
        OpDesc d;
        d.kind = kind;
        d.dtype = DType::Int64;
        d.count = kind == OpKind::Barrier ? 0 : count;
        d.root = 1;
        d.recv = mine.data();
        if (kind == OpKind::Reduce) d.send = mine.data();
        return requests[static_cast<std::size_t>(slot)] = rig.node(slot).collective(rig.now(), comm, d);
    }
    RequestPtr add(int slot, std::size_t count = 1) { return call(slot, OpKind::AllReduce, count); }
    void add_all() {
        for (int slot : all) add(slot);
        rig.settle();
        for (int slot : all) EXPECT(has(slot));
    }
    static std::int64_t input(int slot, std::size_t i) { return static_cast<std::int64_t>(i) + (1 << slot); }
    bool done(int slot) const { return requests[static_cast<std::size_t>(slot)]->done; }
    bool has(int slot, OpKind kind = OpKind::AllReduce) const {
        const auto& request = *requests[static_cast<std::size_t>(slot)];
        const auto& got = data[static_cast<std::size_t>(slot)];
        bool right = request.done && request.status.ok();
        const auto count = kind == OpKind::AllGather ? got.size() / all.size() : got.size();
        for (std::size_t i = 0; i < got.size() && kind != OpKind::Barrier; ++i) {
            std::int64_t sum = 0;
            for (int s : all) sum += input(s, i);
            right &= got[i] == (kind == OpKind::AllReduce   ? sum
                                : kind == OpKind::Broadcast ? input(1, i)
                                                            : input(static_cast<int>(i / count), i % count));
        }
        return right;
    }
    std::size_t under_way() const {
        std::size_t frames = 0;
        for (int from : all)
            for (int to : all) frames += rig.in_flight(from, to);
        return frames;
    }
    void sleep_all() {
        for (int slot : all) rig.sleep(slot);
    }
};

constexpr OpKind kKinds[] = {OpKind::AllReduce, OpKind::AllGather, OpKind::Broadcast, OpKind::Barrier};

}  // namespace ftcomm::unit
