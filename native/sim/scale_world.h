// Whole nodes at scale: nothing goes wrong but what a caller asks for, and what counts is how much there is to do. Time is that of
// LogGP (Alexandrov et al. 1995): a frame costs its sender and its receiver `overhead` and `per_byte` of their one processor each, and
// `latency` on its way; links carry as many as there are. So one rank to whom all send is as slow here as it is in life.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <unordered_set>
#include <vector>

#include "communicator/node.h"

namespace ftcomm::sim {

struct ScaleCost {
    Time latency = 10'000;  // of a link, and of the way to the authority
    Time overhead = 1'000;  // at each end of a frame
    double per_byte = 0.1;  // nanoseconds, at each end
    Time of(std::size_t bytes) const { return overhead + static_cast<Time>(per_byte * static_cast<double>(bytes)); }
};

// What was done since the last start().
struct ScaleCount {
    std::uint64_t messages = 0, bytes = 0, cell_requests = 0;
    std::uint64_t most_sent = 0, most_received = 0;  // messages of the rank that has most
    std::uint64_t most_peers = 0;  // whom one rank has exchanged frames with
    std::uint64_t rounds = 0;  // the longest chain of messages, each sent after the one before had come
    Time time = 0;  // until the last rank was done
};

class ScaleWorld {
public:
    ScaleWorld(int ranks, int per_host, const ScaleCost& cost);
    ~ScaleWorld();

    int ranks() const { return static_cast<int>(ranks_.size()); }
    bool alive(int rank) const;
    int host_of(int rank) const { return rank / per_host_; }
    static constexpr Time kHeartbeat = 1'000'000'000;
    static constexpr CommId kWorld = 7;

    void start_count();  // all living ranks begin at the same instant
    ScaleCount count() const;
    // One input of one rank, `delay` after now or when it is free: input(node, its time).
    template <class Input>
    auto call(int rank, Input input, Time delay = 0) {
        const Time at = begin_input(rank, delay);
        auto result = input(node(rank), at);
        end_input(rank);
        return result;
    }
    void post(int rank, RequestPtr request);  // count().time is when the last of these was done; none may fail
    void look_after_each(std::function<void(int rank)> looks) {
        looks_ = std::move(looks);
    }  // at a rank that was given something
    void done(int rank);  // it has what it waits for: of post() this is said by itself
    void run();  // until nothing is on its way
    void advance(Time by);  // nobody has anything to do meanwhile
    Time now() const { return now_; }
    void kill(int rank);

    std::size_t undone() const { return waited_for_.size(); }

private:
    struct Rank;
    struct Event {
        Time at;
        std::uint64_t order;
        int from, to;  // a rank, or kAuthority
        std::uint64_t depth;
        FrameHeader header;
        std::shared_ptr<const Bytes> payload;
        std::size_t cell;  // of the authority: the operation
        bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
    };
    struct CellOperation {
        int rank;
        bool is_read;
        std::string key;
        std::shared_ptr<const Bytes> expected, desired;
        CellReply reply;
    };
    static constexpr int kAuthority = -1;
    friend struct Rank;

    Node& node(int rank);
    Time begin_input(int rank, Time delay);
    void end_input(int rank);
    void send(int from, int to, const FrameHeader& header, const std::byte* data);
    void ask(int rank, bool is_read, const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request);
    void at_authority(const Event& event);
    void deliver(const Event& event);
    std::shared_ptr<const Bytes> shared(const std::byte* data, std::size_t bytes);

    const int per_host_;
    const ScaleCost cost_;
    std::vector<std::unique_ptr<Rank>> ranks_;
    std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
    std::vector<CellOperation> operations_;
    std::map<std::string, Bytes> cells_;
    std::map<const Request*, RequestPtr> waited_for_;
    std::function<void(int)> looks_;
    Bytes room_;  // a frame is built here
    std::shared_ptr<const Bytes> last_payload_;
    std::uint64_t order_ = 0;
    Time now_ = kHeartbeat, began_ = 0, last_done_ = 0, authority_busy_ = 0;
    ScaleCount count_;
};

}  // namespace ftcomm::sim
