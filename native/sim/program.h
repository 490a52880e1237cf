// What a rank's user does: runs the script, and after an error what the policy asks for (shrink, go on, exit).
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "communicator/node.h"
#include "sim/scenario.h"

namespace ftcomm::sim {

class World;
struct Instance;

enum class Call : std::uint8_t { Collective, Send, Recv, Agree, Shrink, Admit, Join, Leave, Resume, Commit };
const char* to_string(Call call);

// One posted request and the memory that belongs to it (which lives as long as the instance).
struct OpenCall {
    Call call{};
    int step = 0;                 // of the script; shrink: -1 - group
    int comm_index = 0;
    CommId comm = 0;
    std::vector<int> members;     // slots of the communicator
    int rank = 0;                 // own communicator rank
    RequestPtr request;
    OpDesc desc;
    Bytes* send = nullptr;
    Bytes* recv = nullptr;
    bool in_place = false;  // a reduce-scatter whose result goes over its part of `send`
    Bytes before;                 // all_reduce: the input
    Bytes seen;                   // all_reduce: the buffer when last looked at
    int peer = -1, number = 0;    // point-to-point
    std::uint64_t digest = 0;     // replay: of what was received
    std::uint64_t sent = 0;       // replay: of what was given to it
    Time posted = 0;
    bool checked = false;
};

std::string describe(const OpenCall& call);
inline bool holds(const Bytes& memory, const std::byte* at) { return at >= memory.data() && at < memory.data() + memory.size(); }

// What a program saves at a checkpoint: with it, a process goes on as if it had done all that came before.
struct Saved {
    std::uint64_t state = 0;
    std::map<int, std::vector<int>> heard;
    int group = 0;
};

class Program {
public:
    Program(World& world, Instance& self) : world_(world), self_(self) {}
    void start();
    void run();                   // the event
    void fail_request(int step);  // the event
    void revoke(int comm_index);  // the event
    void somebody_is_gone();      // a receive from anyone may have nobody left to wait for
    void admitted_like(const std::vector<const Program*>& survivors, int step);

    std::vector<OpenCall*>& open() { return open_; }
    OpenCall* find(const RequestPtr& request);
    void completed(OpenCall& call);
    int group() const { return group_; }
    bool finished() const { return phase_ == Phase::Finished; }
    const std::vector<int>& heard(int step) { return heard_[step]; }
    bool joining() const { return phase_ == Phase::Joining; }
    int admit_step() const;       // of an open admit, -1
    std::string where() const;
    bool used_again(const std::byte* address) const;  // in the buffer of a request that is done
    void check_scribbles();       // nobody wrote to a buffer after its request was done

private:
    enum class Phase : std::uint8_t { Begin, Joining, Resume, Post, Wait, Recover, Leaving, Finished };
    struct Handle {
        CommId id = 0;
        std::vector<int> members;
        bool created = false, gone = false;
    };
    void create_comms(int group);
    void create(int comm_index);
    bool post_group();            // false: it naps in between
    void post(int step);
    void post_collective(OpenCall& call, const Step& step);
    void post_ring(int step);
    void next_any(int step);
    bool stop_waiting_for_anyone(OpenCall& call);
    bool before_admit(int step) const;
    bool wait_done();             // handles what is done; true when nothing is open
    void after_group();
    void call_shrink(int comm_index);
    void adopt(OpenCall& call);
    void add(std::unique_ptr<OpenCall> call, RequestPtr request);
    Bytes* memory(std::uint64_t bytes);
    // program_replay.cc
    void post_messages(int step);
    void post_send(int step, int of, int peer, int number, std::uint64_t state);
    void post_receive(int step, int of, int peer, int number);
    void post_fan_in(int step);
    void post_answers(int step);
    void post_resume();           // program_checkpoints.cc
    void post_commit(int step);
    void note();
    void resumed();
    bool ends_replay(const OpenCall& call);
    void end_of_replay_group();
    std::unique_ptr<OpenCall> make(Call kind, int step, int comm_index);

    World& world_;
    Instance& self_;
    Phase phase_ = Phase::Begin;
    int group_ = 0, next_step_ = 0;
    bool napped_ = false, stop_ = false;
    bool resumed_ = false;        // replay with checkpoints
    bool goes_back_ = false;      // another one of its log group goes on from an older checkpoint
    std::string tag_;             // from which one, or from which note; empty: from the resume point
    std::uint64_t state_ = 1;     // replay: a hash of all that this rank has received, groups before this one
    std::map<std::pair<int, int>, std::uint64_t> received_;  // replay: in this group; what does not depend on time
    std::map<int, std::vector<int>> heard_;  // replay: step of a fan-in -> sources in the order of its receives
    std::vector<Handle> handles_;
    std::vector<OpenCall*> open_;                   // posted and not yet handled
    std::deque<std::unique_ptr<OpenCall>> calls_;   // all, for late writes
    std::deque<std::unique_ptr<Bytes>> memory_;
    std::vector<int> to_shrink_;
    struct AnyState {
        int step = -1;
        std::vector<int> got;                       // ranks heard
        bool over = true;
    } any_;
};

}  // namespace ftcomm::sim
