// Three ranks on hosts of their own, some of which lose their logs.
#pragma once

#include "tests/node_rig.h"
#include "tests/unit.h"

namespace ftcomm::unit {

inline Rig::Setup apart() {
    Rig::Setup s;
    s.replay = true;
    s.one_host = false;
    return s;
}

// Three ranks, each on a host of its own.
struct Apart {
    Rig rig{3, apart()};
    std::set<int> dead;
    Apart() { rig.comm(kThree, Rig::kComm, Policy::Replay); }

    RequestPtr send(int from, int to, std::int64_t value, std::int64_t tag = 3) {
        return rig.node(from).send(rig.now(), Rig::kComm, &value, sizeof value, to, tag);
    }
    RequestPtr receive(int at, int from, std::int64_t* value, std::int64_t tag = 3) {
        *value = 0;
        return rig.node(at).recv(rig.now(), Rig::kComm, value, sizeof *value, from, tag);
    }
    // As the program of a rank does it, one after another.
    std::int64_t received(int at, int from, std::int64_t tag = 3) {
        std::int64_t value = 0;
        const auto r = receive(at, from, &value, tag);
        rig.settle();
        REQUIRE(r->done && r->status.ok());
        return value;
    }
    void sums(std::int64_t each) {
        std::int64_t values[3] = {each, each, each};
        for (int s : kThree) rig.sum(s, values[s]);
        rig.settle();
        for (auto v : values) EXPECT_EQ(v, 3 * each);
    }
    void kill(int slot) {
        rig.kill(slot);
        dead.insert(slot);
        for (int s : kThree)
            if (!dead.contains(s)) rig.evidence(s, slot, Evidence::Agent);
        rig.settle();
    }
    RequestPtr restart(int slot) {
        rig.restart(slot);
        dead.erase(slot);
        rig.settle();
        return again(slot);
    }
    RequestPtr again(int slot) {
        CommSpec spec;
        spec.id = Rig::kComm;
        spec.name = "rig";
        spec.members = kThree;
        spec.policy = Policy::Replay;
        (void)rig.node(slot).create_comm(rig.now(), spec);
        auto ready = rig.node(slot).comm_ready(rig.now(), Rig::kComm);
        return ready;
    }
    RequestPtr lost(int slot) {
        kill(slot);
        rig.lose_log(slot);
        auto ready = restart(slot);
        rig.settle();
        return ready;
    }
    // What the slot's streams hold: of messages with others, and of results.
    std::map<LogKey, std::vector<Bytes>> contents(int slot) {
        std::map<LogKey, std::vector<Bytes>> out;
        for (const auto& [key, records] : rig.log(slot).streams)
            if (key.dst != kHeard && !records.empty())
                for (const auto& r : records) out[key].push_back(r.payload);
        return out;
    }
    std::string refused(const RequestPtr& ready) {
        REQUIRE(ready->done && !ready->status);
        EXPECT_EQ(ready->status.code, Code::LogCorrupt);
        return ready->status.message;
    }
    void all_mark(const std::string& tag, bool commits) {
        for (const auto& one : rig.mark_all(tag, commits)) EXPECT(one->status.ok());
    }
};

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace ftcomm::unit
