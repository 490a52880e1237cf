// The head cells, as a store far away keeps them: slow, sometimes of unknown outcome, sometimes lost, sometimes reborn blank.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "membership/authority.h"
#include "sim/queue.h"
#include "sim/random.h"

namespace ftcomm::sim {

class World;
struct Instance;

class Store {
public:
    Store(World& world, Random random) : world_(world), random_(random) {}
    void ask(Instance& who, bool is_read, const std::string& key, const Bytes& expected, const Bytes& desired,
             std::uint64_t request);
    void reached(int operation);   // events
    void answered(int operation);
    void create(const std::string& key, const Bytes& value) { cells_[key] = value; }
    const Bytes& cell(const std::string& key) { return cells_[key]; }

    std::uint64_t boot = 77;
    Time slow_until = 0;           // every step takes up to `slow_by` longer until then
    Time slow_by = 0;
    int unknown_next = 0;          // so many answers will be Unknown
    bool lost = false;
    void restart_blank() {
        cells_.clear();
        boot += 1000;
    }

private:
    struct Operation {
        int who = 0;
        bool is_read = false;
        std::string key;
        Bytes expected, desired;
        CellReply reply;
    };
    Time delay();
    World& world_;
    Random random_;
    std::map<std::string, Bytes> cells_;
    std::vector<Operation> operations_;
};

class SimAuthority final : public Authority {
public:
    SimAuthority(World& world, Instance& self) : world_(world), self_(self) {}
    void read(const std::string& key, std::uint64_t request) override;
    void compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) override;

private:
    World& world_;
    Instance& self_;
};

}  // namespace ftcomm::sim
