// The all-reduce of Grover and Rajagopal 2022: a ring (reduce-scatter, then all-gather) whose every step is a logged send and a logged
// receive. A sum goes around from record to record: what comes is added to this rank's part in the record that goes out. It needs
// no votes, plans or fence, as messages alone make it whole again; and it logs 2(n-1)/n times the data on each rank where a logged
// result takes 1/n. Two ranks exchange what is short, so that neither waits for the other's sum. Here for comparison (`algorithm="ring-logged"`).
#pragma once

#include <deque>
#include <memory>
#include <utility>

#include "communicator/logged_pairs.h"

namespace ftcomm {

class LoggedRing {
public:
    LoggedRing(Core& core, const CommSpec& spec, int rank, std::unique_ptr<LoggedPairs> pairs)
        : core_(core), spec_(spec), rank_(rank), pairs_(std::move(pairs)) {}

    LoggedPairs& pairs() { return *pairs_; }

    // One after another, in the order of the calls.
    void post(const RequestPtr& request, const OpDesc& desc, Time timeout);
    void pump();  // a receive may have ended
    void postpone();  // every one has its whole time again
    bool fail(const RequestPtr& request, Code why);  // false: not one of these
    bool idle() const { return queue_.empty(); }
    bool has_failed() const { return !broken_; }  // and will say so from now on

private:
    struct Op {
        RequestPtr request;
        OpDesc desc;
        Time timeout, deadline;
    };
    int size() const { return static_cast<int>(spec_.members.size()); }
    int before() const { return (rank_ + size() - 1) % size(); }
    int after() const { return (rank_ + 1) % size(); }
    bool reducing() const { return step_ < size() - 1; }
    bool is_last() const { return exchanges() || step_ == 2 * (size() - 1) - 1; }
    std::int64_t tag() const;
    int chunk() const;  // that comes in this step
    bool whole() const;
    bool exchanges() const;
    bool travels(int chunk) const { return !whole() || chunk == 0; }
    std::uint64_t total() const;  // bytes
    std::uint64_t begin(int chunk) const;
    std::uint64_t bytes(int chunk) const;
    std::byte* at(int chunk) const;
    const std::byte* own(int chunk, std::uint64_t at, std::uint64_t bytes);
    void start();
    void next();
    bool send(const std::byte* data, int chunk);
    void advance();
    Status say_nothing();
    Status pass_on(int chunk);
    Status keep(int chunk, const LogRecord& came);
    Status add(const LogRecord& came);
    Status damaged();
    void finish(Status status);
    void fail_all(const Status& status);

    Core& core_;
    const CommSpec& spec_;
    const int rank_;
    const std::unique_ptr<LoggedPairs> pairs_;
    std::deque<Op> queue_;
    int step_ = 0;  // of 2(n-1)
    RequestPtr receiving_;
    Bytes scaled_;  // of premul_sum, this rank's summand
    Bytes made_;  // of a long one, a stretch of a sum: on its way past the caches
    Status broken_;  // messages of one that failed are still under way: none after it can be told from them
};

}  // namespace ftcomm
