// One error type for the whole core: a code, who is concerned, and a chain of context.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ftcomm {

// The values are part of the C ABI (FT_* in ftcomm.h) and of recorded decisions: never renumber.
enum class Code : std::uint8_t {
    Ok = 0,
    PeerFailure = 1,   // a member died; `ranks` and `evidence` say who and how it was noticed
    Revoked = 2,       // the communicator was revoked
    StaleEpoch = 3,    // this rank was voted out of the job
    NoAuthority = 4,   // the head cell is lost: nothing can be decided safely
    Timeout = 5,       // a live rank never entered; `ranks` are the missing ones
    Mismatch = 6,      // ranks called different operations; `ranks` are those who differ from the lowest rank
    Invalid = 7,       // bad argument, found locally, nothing was sent
    Interrupted = 8,   // a signal arrived; the caller may wait again
    Closed = 9,        // the communicator or job was closed
    System = 10,       // the operating system refused something (message says what)
    Unsupported = 11,
    Truncated = 12,    // an incoming message is larger than the receive buffer
    Cancelled = 13,
    Internal = 14,
    LogFull = 15,
    LogCorrupt = 16,
    ReplayDiverged = 17,
};

enum class Evidence : std::uint8_t {
    None = 0,
    RobustFutex = 1,   // the kernel released the dead thread's futex: confirmed
    Pidfd = 2,         // the process is gone: confirmed
    Agent = 3,         // its host's agent or a rank there says so: confirmed
    Reborn = 4,        // a newer incarnation of the slot showed up: confirmed
    Heartbeat = 5,     // silence: a suspicion
    Reset = 6,         // connection reset or refused: a suspicion, proposed at once
    Left = 7,          // said goodbye
    Group = 8,         // replay: it lives, but one of its log group died, and they start again together
    GaveUp = 9,        // replay: it lives, but no longer waits for one that has died, and says so itself: confirmed
};

inline bool is_confirmed(Evidence e) {
    return e == Evidence::RobustFutex || e == Evidence::Pidfd || e == Evidence::Agent || e == Evidence::Reborn ||
           e == Evidence::Left || e == Evidence::GaveUp;
}

const char* to_string(Code code);
const char* to_string(Evidence evidence);

struct Status {
    Code code = Code::Ok;
    std::string message;              // a full sentence for people; says what to do
    std::string operation;            // "all_reduce #12 of communicator world"
    std::vector<int> ranks;           // communicator ranks concerned
    std::vector<Evidence> evidence;   // parallel to ranks, may be empty
    std::uint64_t epoch = 0;          // job epoch at the decision

    Status() = default;
    // One that is ok says nothing else: most that go up a chain of calls are, and cost next to nothing on each step.
    Status(const Status& other) {
        if (!other.ok()) *this = other;
    }
    Status& operator=(const Status&) = default;
    Status(Status&& other) noexcept {
        if (!other.ok()) take(std::move(other));
    }
    Status& operator=(Status&& other) noexcept {
        if (!ok() || !other.ok()) take(std::move(other));
        return *this;
    }
    ~Status() = default;

    bool ok() const { return code == Code::Ok; }
    explicit operator bool() const { return ok(); }

    static Status error(Code c, std::string text) {
        Status s;
        s.code = c;
        s.message = std::move(text);
        return s;
    }
    // "what: message": prepends context on the way up.
    Status within(const std::string& what) && {
        message = what + ": " + message;
        return std::move(*this);
    }

private:
    void take(Status&& other) noexcept {
        code = other.code;
        message = std::move(other.message);
        operation = std::move(other.operation);
        ranks = std::move(other.ranks);
        evidence = std::move(other.evidence);
        epoch = other.epoch;
    }
};

}  // namespace ftcomm
