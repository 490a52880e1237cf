// What the opaque pointers of ftcomm.h point to.
#pragma once

#include <atomic>
#include <memory>

#include "runtime/job.h"

struct ft_job {
    std::shared_ptr<ftcomm::Job> job;
    std::uint64_t generation;  // of the process that made it (fork_guard)
};

struct ft_request {
    std::shared_ptr<ftcomm::Job> job;
    ftcomm::RequestPtr request;
    std::uint64_t generation;
    bool survivors;            // its ranks are the survivors, not the contributors
    std::atomic<bool> held{false};  // bells may have been held back when it was posted
};

namespace ftcomm::capi {

// Keeps `status` as this thread's last error; returns its code.
int fail(const Status& status);
int fail(Code code, const std::string& message);

// FT_OK, or the error of a handle that cannot be used: nullptr, or inherited through a fork.
int check(const ft_job* job);
int check(const ft_request* request);
// Also: started and not left.
int check_running(const ft_job* job);
// Also, with the engine held: another thread may have closed the job after the look before.
int check_node(const ft_job* job);

int give(ft_job* job, RequestPtr request, bool survivors, ft_request** out);
void put_flags(const RankSet& set, std::uint8_t* flags, std::size_t size);

// Nothing may be thrown through C: memory exhaustion and the like become an error code.
template <class F>
int guarded(F f) noexcept {
    try {
        return f();
    } catch (const std::exception& e) {
        return fail(Code::System, std::string("the library ran out of a resource: ") + e.what());
    }
}

}  // namespace ftcomm::capi
