// How a rank gets at the shared memory of its host. Replacements: from any rank that has it; and if all of them are dead, the replacements
// of this host make a new segment among themselves. Without it they would be linked by tcp alone, and under replay a sum that was begun by
// ranks that read each other's memory would be done again in another order (L7).
//
// Who has the segment has the host's common name (handoff.h): the replacement that can bind it makes the segment, the others ask there.
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/failpoint.h"
#include "runtime/handoff_wire.h"
#include "runtime/job.h"

namespace ftcomm {
namespace {

constexpr Time kBetweenJoinTries = 1'000'000;

}  // namespace

Status Job::read_view(Bytes* view) {
    view->resize(kMaxView);
    const auto key = Node::view_key(config_.job);
    auto n = config_.store.get(config_.store.context, key.c_str(), reinterpret_cast<std::uint8_t*>(view->data()), view->size());
    if (n <= 0 || n > static_cast<std::int64_t>(kMaxView))
        return Status::error(Code::NoAuthority, "the store does not have the job's view: it was restarted, or is another one");
    view->resize(static_cast<std::size_t>(n));
    return {};
}

// OK: *held says whether this rank has it now, or another one.
Status Job::claim_segment(bool* held) {
    Engine::Hold hold(engine_);
    const auto claim = giver_.claim(key_.common(config_.job, own_.domain));
    *held = claim == HandoffGiver::Claim::Held;
    if (claim != HandoffGiver::Claim::Failed) return {};
    return Status::error(Code::System, std::string("a unix socket for it: ") + std::strerror(errno));
}

Status Job::ask_for_segment(const std::string& socket, std::uint64_t nonce, Time until) {
    handoff::Descriptors got;
    auto status = asker_.ask(socket, nonce, key_, config_.rank, config_.incarnation, joining_, until, stop_event_, &got);
    if (!status) return status;
    {
        Engine::Hold hold(engine_);
        giver_.adopt(got.listener, key_.common(config_.job, own_.domain));
    }
    return segment_.open(got.segment, job_hash_, boot_, config_.world_size);
}

Status Job::join_host() {
    {
        Engine::Hold hold(engine_);
        giver_.close_own_name();
    }
    const bool must = must_join_segment();
    auto status = own_.domain != 0 ? join_segment(must) : Status::error(Code::System, "this process has no unix socket");
    asker_.close();
    if (status) {
        FT_POINT("join.mapped");
        RankSet have;
        for (int slot = 0; slot < config_.world_size; ++slot)
            if (segment_.newest_instance(slot) != nullptr) have.add(slot);
        return share_memory(have);
    }
    if (status.code == Code::Closed) return status;
    {
        Engine::Hold hold(engine_);
        giver_.close();
    }
    if (must) return std::move(status).within("joining through shared memory");
    say("shared memory of this host: " + status.message + ": this rank uses tcp");
    return {};
}

// Whether tcp cannot take its place: the job's decisions are nowhere else.
bool Job::must_join_segment() {
    Bytes view;
    return needs_memory() || !config_.has_store || !read_view(&view);
}

Status Job::join_segment(bool must) {
    const auto common = key_.common(config_.job, own_.domain);
    // Those who have it may all be stopped, not dead. With tcp to fall back on that is not worth much waiting.
    const auto patience = must ? deadline_ : std::min(deadline_, IoLoop::now() + 2 * config_.heartbeat);
    const std::string stopped = "those of this host who have it do not answer; are they stopped? kill them";
    bool said = false;
    for (;;) {
        bool held = false;
        if (auto s = claim_segment(&held); !s) return s;
        if (held) {
            // Not where the job's decisions were in the memory of those who died.
            Bytes now;
            if (!config_.has_store || !read_view(&now))
                return Status::error(
                    Code::System,
                    "no rank of this host is in the job any more: it has ended meanwhile, or all have died, and this "
                    "rank came too late. If the job is not done, start it again");
            FT_POINT("join.make");
            if (auto s = segment_.create(job_hash_, boot_, config_.world_size); !s) return s;
            segment_.header().authority = shm::kInStore;
            return {};
        }
        // In slices: who has accepted and was stopped then does not answer, and another one may.
        auto status = ask_for_segment(common.name, common.nonce, std::min(patience, IoLoop::now() + 2 * config_.heartbeat));
        if (status || (status.code != Code::Timeout && status.code != Code::PeerFailure)) return status;
        if (IoLoop::now() >= patience) return Status::error(Code::Timeout, stopped);
        if (status.code == Code::Timeout) {
            if (!said) say("waiting for the shared memory of this host: " + stopped);
            said = true;
            continue;
        }
        // They died; or the name is bound and does not listen yet, which is one system call. Only that is no event.
        if (handoff::wait_ready(stop_event_, POLLIN, IoLoop::now() + kBetweenJoinTries, stop_event_) != 0)
            return Status::error(Code::Closed, "the job was closed while it started");
    }
}

}  // namespace ftcomm
