// Ranks that share the processors of one host, and what they do by windows of shared memory.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

inline Rig::Setup with_windows(bool stages = true) {
    Rig::Setup s;
    s.reads = s.crowded = true;
    s.max_payload = 64;  // a segment, which nothing small is longer than
    s.stage_bytes = 256;
    if (stages) s.stage_limit = 0;
    return s;
}

// The segment is full for one of four, or for all of them; memory is read then, or comes in frames.
inline std::vector<Rig::Setup> without_room() {
    std::vector<Rig::Setup> all;
    for (const auto& windowless : {std::set<int>{2}, std::set<int>{0, 1, 2, 3}})
        for (bool reads : {true, false}) {
            all.push_back(with_windows());
            all.back().windowless = windowless;
            all.back().reads = reads;
            all.back().near = true;
        }
    return all;
}

// Ranks of one communicator, each with the operation that it called last.
struct Windowed {
    Rig rig;
    std::vector<int> all;
    std::vector<RequestPtr> requests;

    explicit Windowed(int ranks, Rig::Setup setup = with_windows(), Policy policy = Policy::Lossy)
        : rig(ranks, setup), all(static_cast<std::size_t>(ranks)), requests(all.size()) {
        std::iota(all.begin(), all.end(), 0);
        rig.comm(all, Rig::kComm, policy);
    }
    // Once it was tried; what runs in its place reads memory, where it may.
    bool goes_on_without(const Rig::Setup& setup, const char* tried) {
        const bool in_frames = rig.traced(0, "run.repair") || rig.traced(0, "run.groups.repair");
        return rig.traced(0, tried) && (setup.reads ? rig.traced(0, "run.pull.repair") : in_frames) &&
               rig.node(0).lacks_windows();
    }
    static std::int32_t input(int slot, std::size_t i, int salt) {  // of who adds
        return static_cast<std::int32_t>(i) * (slot + 1) + salt * 1000003;
    }
};

// Of five: one dies, another one knows it first, leaves the attempt, and puts something of another communicator into its window, while a late one
// that does not know yet still looks into it.
struct RunsAhead {
    static constexpr CommId kOther = 8;
    static constexpr int kLate = 2, kDying = 3, kAhead = 4;
    const std::vector<int> left{0, 1, kLate, kAhead};
    int reused = 0;

    // All have entered, and the late one has done so many pieces. False: they were through. `more`: what is put there.
    bool run(Rig& rig, const std::vector<RequestPtr>& requests, int pieces, OpKind other, std::vector<std::int32_t>& more) {
        const std::vector<int> others{0, 1, kDying, kAhead}, rest{0, 1, kLate};
        rig.comm(left, kOther, Policy::Lossy);
        for (int i = 0; i < pieces; ++i) {
            rig.go_on(others);
            if (!rig.work(kLate)) break;
        }
        rig.go_on(others);
        if (requests[kAhead]->done) return false;
        for (int slot : rest) rig.hold(kAhead, slot);
        rig.kill(kDying);
        rig.evidence(kAhead, kDying, Evidence::Pidfd);
        rig.settle();
        OpDesc d;
        d.kind = other;
        d.root = 3;  // this rank there
        d.dtype = DType::Int32;
        d.count = more.size();
        d.recv = more.data();
        const auto second = rig.node(kAhead).collective(rig.now(), kOther, d);
        while (rig.work(kAhead)) {}
        reused += rig.traced(kAhead, "freeze");
        rig.go_on(rest);
        for (int slot : rest) {
            rig.hold(kAhead, slot, false);
            rig.evidence(slot, kDying, Evidence::Pidfd);
        }
        rig.go_on(left);
        return true;
    }
};

}  // namespace ftcomm::unit
