// The head cells in a user's store (torch's TCPStore in the agent): compare_set on its own thread (rules M1-M3).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "communicator/request.h"
#include "ftcomm/ftcomm.h"
#include "membership/authority.h"
#include "runtime/io_loop.h"

namespace ftcomm {

// Store calls may block: they run on a thread of this class, one at a time, in order. Each request gets exactly one
// reply, on the io loop with the engine locked, until stop().
//
// Cells are "<job>/..." keys as the node names them, content as it is. "<job>/boot" holds the boot nonce (16 hex
// digits); each reply carries the nonce read after the operation; a missing or malformed one is a lost authority (M3).
class StoreAuthority final : public Authority {
public:
    using Deliver = std::function<void(CellReply reply)>;

    StoreAuthority(const ft_store& store, std::string job, IoLoop& loop, Deliver deliver);
    ~StoreAuthority() override;  // stop() with a bound of 0

    Status start();

    void read(const std::string& key, std::uint64_t request) override;
    void compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) override;

    // Formation, before start(), blocking, on the calling thread. The lowest rank writes the nonce; it is an error when
    // another one is there already (a reused job name). The others check that theirs is the one in the store.
    static Status write_boot(const ft_store& store, const std::string& job, std::uint64_t boot);
    static Status check_boot(const ft_store& store, const std::string& job, std::uint64_t boot);
    static Status read_boot(const ft_store& store, const std::string& job, std::uint64_t* boot);  // a joiner

    // No reply is delivered after it returns. Waits up to `bound` for a call that is in the store; one that still hangs
    // then is left behind on its own thread, which touches nothing of the job any more. Not with the engine locked.
    // True: the thread has ended (the store's context may go); false: it hangs in the store.
    bool stop(Time bound);
    void close_in_child();  // after fork: forgets the thread; no lock

private:
    struct Shared;
    std::shared_ptr<Shared> shared_;
    bool started_ = false;
    bool forked_ = false;
};

}  // namespace ftcomm
