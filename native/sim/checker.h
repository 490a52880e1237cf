// The invariants. Each input touches one rank, so only that rank's open buffers and what it has just completed are looked at;
// what concerns all survivors is settled at the end of the run.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "channel/log.h"
#include "communicator/node.h"
#include "sim/memory_log.h"
#include "sim/program.h"
#include "sim/scenario.h"

namespace ftcomm::sim {

class World;
struct Instance;

// What an undisturbed run of a replay scenario has given, or another incarnation of the same rank.
class History {
public:
    enum class What : std::uint8_t { Result, Sent, Source };
    struct Key {
        What what{};
        int slot = 0, step = 0, peer = -1, number = 0;
        auto operator<=>(const Key&) const = default;
    };
    std::map<Key, std::uint64_t> digests;
    std::map<LogKey, std::vector<std::uint64_t>> logs;  // a digest of each record
};

class Checker {
public:
    explicit Checker(World& world) : world_(world) {}
    void posted(Instance& who, const OpenCall& call);
    void completed(Instance& who, OpenCall& call);
    void no_leave_is_a_failure(Instance& who, const OpenCall& call, const Status& failure);  // Q
    void touched(Instance& who);                       // B
    void event(Instance& who, const NodeEvent& event); // V, Q
    void finish();                                     // U over the survivors
    // Replay, check_replay.cc
    void sends(Instance& who, OpenCall& call, int of);  // before it does: X, L1
    void logged(const LogKey& key, const LogRecord& record);
    void logs_are_as_written(LogFiles& files);
    void compare_with(const History* undisturbed) { undisturbed_ = undisturbed; }
    History&& take_history() { return std::move(history_); }
    void new_generation() { views_.clear(); }
    int admit_step_of(int slot, std::uint32_t incarnation) const;  // where it was admitted, -1 unknown

private:
    struct Result {
        int instance = 0;
        Code code{};
        std::uint64_t hash = 0;     // of chunks and contributors, or of the agreed value
        Time at = 0;
        std::string text;
    };
    struct Reference {
        RankSet contributors;
        Bytes data;
    };
    struct Record {
        Call call{};
        int step = 0;
        std::vector<int> members;
        RankSet posted;             // slots
        std::vector<Result> results;
        std::vector<Reference> references;
    };
    using Key = std::pair<std::int64_t, CommId>;
    static Key key(const OpenCall& call);
    Record& record(const OpenCall& call);
    void check_collective(Instance& who, OpenCall& call, Record& rec);
    void check_chunk(Instance& who, OpenCall& call, Record& rec, const Chunk& chunk);
    void check_message(Instance& who, OpenCall& call);
    const Bytes& reference(Record& rec, const Step& step, int step_index, const std::vector<int>& members,
                           const RankSet& contributors, std::uint64_t total);
    void check_replay(Instance& who, OpenCall& call);
    void same(const History::Key& key, std::uint64_t digest, bool in_time, const std::string& what);
    void finish_replay();
    void check_codes(Instance& who, const OpenCall& call);
    void progress_of(Instance& who, const OpenCall& call);

    World& world_;
    std::map<Key, Record> records_;
    History history_;
    const History* undisturbed_ = nullptr;
    std::map<std::uint64_t, RankSet> views_;           // epoch -> alive slots
    std::map<std::pair<int, std::uint32_t>, int> admitted_;
};

}  // namespace ftcomm::sim
