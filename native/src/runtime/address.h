// What a rank publishes before the job starts.
#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/rank_set.h"
#include "base/status.h"
#include "communicator/request.h"

namespace ftcomm {

enum class TransportChoice : std::uint8_t { Auto = 0, Shm = 1, Tcp = 2 };
enum class AuthorityChoice : std::uint8_t { Auto = 0, Shm = 1, Store = 2 };
const char* to_string(TransportChoice choice);
const char* to_string(AuthorityChoice choice);

struct Address {
    std::uint64_t job = 0;            // hash of its name
    std::int32_t world_size = 0, rank = 0;
    std::uint32_t incarnation = 0;
    std::uint64_t host = 0, domain = 0;
    std::string socket;               // abstract name that hands out the segment; empty: none
    std::uint64_t nonce = 0;          // of this process, for the hand-out
    std::uint64_t processes = 0;      // with the same one, pid means the same process
    std::int32_t pid = 0;
    std::uint64_t kernel = 0;         // with the same one, a processor's number means the same processor
    RankSet processors;               // that it may run on
    // Equal on all ranks (C8), else the job does not start.
    TransportChoice transport = TransportChoice::Auto;
    AuthorityChoice authority = AuthorityChoice::Auto;
    Policy policy = Policy::Raise;    // of the communicator of all ranks
    bool has_store = false, has_secret = false, peer_memory = true;
    bool streams = false;             // its links (base/streaming.h); equal on all ranks of a machine
    std::string log = "all";          // which messages are logged
    Time heartbeat = 0;
    std::uint64_t flat_limit = 0, pull_limit = 0, reduce_pull_limit = 0, segment_bytes = 0, eager_limit = 0, stream_limit = 0,
                  stage_limit = 0, post_limit = 0, spread_degree = 0;

    Bytes tcp;                        // TcpTransport's own blob, empty: none

    Bytes encode() const;
    static Status decode(ByteView blob, Address* out);
    // Whether `other`, published for slot `slot`, can be in one job with this; says which option differs.
    Status check_agrees(const Address& other, int slot) const;
    // Whether both are on one machine, whatever wires and host names they have. Without a secret nobody is on another one.
    bool shares_machine(const Address& other) const { return other.job == job && (other.kernel == kernel || !has_secret); }
};

// Whether each rank that may run on the processors of `one`, itself included, has one of its own.
bool has_own_processor(const Address& one, const std::vector<Address>& all);
// Whether all are on one host, and some have to share: more ranks may run on nothing but these processors, or those of some rank, than
// there are. (One rank that is bound to a processor does not make the others crowd it.) The same on all ranks with the same addresses.
bool is_crowded(const std::vector<Address>& all);

}  // namespace ftcomm
