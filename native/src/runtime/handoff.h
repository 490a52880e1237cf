// How the ranks of a host get at its segment: over an abstract unix socket, against proof that both are of the job.
//
//   asker                                                   giver
//   Ask {rank, incarnation, nonce, HMAC(giver's nonce)} ->
//                                                       <-  Give {HMAC(asker's nonce)} + two descriptors
//   at formation only:
//   Mapped {ok}                                         ->
//                                                       <-  Go {ranks that have it}, or Abort {ranks that are missing}
// Both ends also compare user ids (SO_PEERCRED).
//
// At formation the giver is the lowest rank of the host, under a name and with a nonce that are in its address. Replacements ask under the
// host's common name, which all of the job can work out. The kernel lets one process bind it; its listener is the second descriptor,
// given away with the segment. So whoever has the segment keeps the name bound and answers there, and as long as one of them lives, or
// the descriptors are on their way to one, nobody else can bind it: a host never has two segments with living ranks in both.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "communicator/request.h"
#include "runtime/handoff_wire.h"
#include "runtime/io_loop.h"

namespace ftcomm {

struct HandoffKey {
    Bytes key;  // from secret, job and boot nonce
    static HandoffKey make(ByteView secret, std::uint64_t job, std::uint64_t boot);
    struct Common {
        std::string name;
        std::uint64_t nonce = 0;
    };
    Common common(const std::string& job, std::uint64_t domain) const;
};

class HandoffGiver {
public:
    ~HandoffGiver() { close(); }
    // The name shows the job: to people (ss -xl), and to tests that look for what a job leaves behind.
    Status listen(const std::string& job);
    const std::string& name() const { return name_; }
    std::uint64_t nonce() const { return nonce_; }

    // Formation, on the calling thread, until `deadline` or until stop_fd is readable: gives `segment_fd` to all of
    // `expected`; `mapped` are those that have it. On success everybody has been answered and waits for go().
    Status gather(const HandoffKey& key, int segment_fd, const RankSet& expected, Time deadline, int stop_fd, RankSet* mapped);
    void go(const RankSet& have);

    enum class Claim { Held, Taken, Failed };  // Failed: errno
    Claim claim(const HandoffKey::Common& common);
    void adopt(int listener, const HandoffKey::Common& common);  // of the one who gave the segment

    // Afterwards, on the io loop (engine locked): gives to replacements, under the common name. Until `may_give` says no: a rank that was
    // voted out lets go of the name, as if it had died.
    Status serve(IoLoop& loop, const HandoffKey& key, int segment_fd, std::function<bool()> may_give);
    void close_own_name();  // from formation on it is of no use
    void close();  // with the engine locked when serving
    void close_in_child();  // descriptors only

private:
    struct Asker {
        std::uint64_t nonce = 0;  // of the name under which it asks
        int rank = -1;
        bool joining = false, answered = false, mapped = false;
    };
    int accept_one(int listener, std::uint64_t nonce);
    void close_listener(int* listener);
    void abort(const RankSet& missing);  // tells all who wait
    // False: the connection is of no use any more.
    bool receive(int fd, Asker& asker);

    std::string name_;
    std::uint64_t nonce_ = 0;
    int listener_ = -1, common_ = -1, segment_ = -1;
    std::uint64_t common_nonce_ = 0;
    HandoffKey key_;
    IoLoop* loop_ = nullptr;
    std::function<bool()> may_give_;
    std::map<int, Asker> askers_;
};

class HandoffAsker {
public:
    ~HandoffAsker() { close(); }
    // Until `deadline` or until stop_fd is readable. The descriptors are the caller's. PeerFailure: nobody listens there, or not any more.
    Status ask(const std::string& name, std::uint64_t giver_nonce, const HandoffKey& key, int rank, std::uint32_t incarnation,
               bool joining, Time deadline, int stop_fd, handoff::Descriptors* got);
    // Formation: says whether the segment could be mapped, waits for everybody.
    Status await_go(bool mapped, Time deadline, int stop_fd, RankSet* have);
    bool is_open() const { return fd_ >= 0; }
    void close();

private:
    Status receive(Time deadline, int stop_fd, Bytes* message, handoff::Descriptors* got);
    int fd_ = -1;
};

}  // namespace ftcomm
