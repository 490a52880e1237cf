// How the ranks of a host get at its segment: over an abstract unix socket, against proof that both are of the job.
//
//   asker                                                   giver
//   Ask {rank, incarnation, nonce, HMAC(giver's nonce)} ->
//                                                       <-  Give {HMAC(asker's nonce)} + the descriptor
//   at formation only:
//   Mapped {ok}                                         ->
//                                                       <-  Go {ranks that have it}, or Abort {ranks that are missing}
// The nonce of the giver is in its address; both ends also compare user ids (SO_PEERCRED).
#pragma once

#include <sys/types.h>

#include <map>
#include <string>

#include "base/bytes.h"
#include "base/status.h"
#include "communicator/request.h"
#include "runtime/io_loop.h"

namespace ftcomm {

struct HandoffKey {
    Bytes key;  // from secret, job and boot nonce
    static HandoffKey make(ByteView secret, std::uint64_t job, std::uint64_t boot);
    struct Common {
        std::string name;
        std::uint64_t nonce = 0;
    };
    // A socket that any rank of the host can find without having heard of another (runtime/join_host.cc).
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

    // Afterwards, on the io loop (engine locked): gives to replacements, under its own name and the common one, if that is held.
    Status serve(IoLoop& loop, const HandoffKey& key, int segment_fd);

    // A replacement has nothing to give yet. Nobody must wait for it meanwhile, least of all one that it waits for itself: until
    // serve() it refuses connections.
    void rest();
    enum class Claim { Held, Taken, Failed };  // Failed: errno
    // At most one process has the name; the kernel takes it from a dead one. Those who ask there wait until serve().
    Claim claim(const HandoffKey::Common& common);
    void give_up_claim();
    void close();           // with the engine locked when serving
    void close_in_child();  // descriptors only

private:
    struct Asker {
        std::uint64_t nonce = 0;  // of the name under which it asks
        int rank = -1;
        bool joining = false, answered = false, mapped = false;
    };
    Status open_listener();
    Status serve_at(int listener, std::uint64_t nonce);
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
    std::map<int, Asker> askers_;
};

class HandoffAsker {
public:
    ~HandoffAsker() { close(); }
    // Until `deadline` or until stop_fd is readable. *segment_fd is the caller's.
    Status ask(const std::string& name, std::uint64_t giver_nonce, const HandoffKey& key, int rank, std::uint32_t incarnation,
               bool joining, Time deadline, int stop_fd, int* segment_fd);
    // Formation: says whether the segment could be mapped, waits for everybody.
    Status await_go(bool mapped, Time deadline, int stop_fd, RankSet* have);
    bool is_open() const { return fd_ >= 0; }
    void close();

private:
    Status receive(Time deadline, int stop_fd, Bytes* message, int* descriptor);
    int fd_ = -1;
};

}  // namespace ftcomm
