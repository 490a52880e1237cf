// How a replacement gets at the shared memory of its host.
//
// From a living rank of the host, whoever answers first. If none is left, the replacements of this host make a segment among themselves:
// otherwise they would be linked by tcp alone, and under replay a sum that was begun by ranks that read each other's memory would be
// done again in another order (L7). So that they make one, and not each its own, they go by a name that all of them can work out:
//
//   - The kernel gives the name to one of them, and takes it back when that one dies. Only the holder asks the living, makes the
//     segment if there are none, and gives it away for as long as it lives. The others ask the holder.
//   - Nobody waits for somebody who waits for it: the holder asks under the ranks' own names, and a replacement refuses connections
//     there until it has the segment (HandoffGiver::rest).
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/failpoint.h"
#include "membership/view.h"
#include "runtime/handoff_wire.h"
#include "runtime/job.h"

namespace ftcomm {
namespace {

constexpr Time kBetweenTries = 1'000'000;

Status no_answer() { return Status::error(Code::System, "no rank of this host answers"); }

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

Status Job::join_host() {
    auto status = own_.domain != 0 ? join_segment() : no_answer();
    if (status.ok() || status.code == Code::Closed) return status;
    giver_.give_up_claim();
    if (needs_memory()) return std::move(status).within("joining through shared memory");
    say("shared memory of this host: " + status.message + ": this rank uses tcp");
    return {};
}

Status Job::join_segment() {
    giver_.rest();
    const auto common = key_.common(config_.job, own_.domain);
    // A holder that is stopped, not dead: with tcp to fall back on it is not worth much waiting.
    const auto until = needs_memory() ? deadline_ : std::min(deadline_, IoLoop::now() + 2 * config_.heartbeat);
    for (;;) {
        const auto claim = giver_.claim(common);
        if (claim == HandoffGiver::Claim::Failed)
            return Status::error(Code::System, std::string("a unix socket for it: ") + std::strerror(errno));
        if (claim == HandoffGiver::Claim::Held) {
            FT_POINT("join.claim");
            if (auto s = ask_the_living(); !s) return s;
            if (!segment_.is_open())
                if (auto s = make_segment(); !s) return s;
            break;
        }
        if (auto s = ask_for_segment(common.name, common.nonce, until); s || s.code == Code::Closed || s.code == Code::Timeout) {
            if (!s) return s;
            break;
        }
        // It died, or has given up, or holds the name but does not listen yet, which is one system call. Only the last is no event.
        const int waited = handoff::wait_ready(stop_event_, POLLIN, IoLoop::now() + kBetweenTries, stop_event_);
        if (waited != 0) return Status::error(Code::Closed, "the job was closed while it started");
        if (IoLoop::now() >= until) return Status::error(Code::Timeout, "another rank of this host has it, and does not give it");
    }
    RankSet have;
    for (int slot = 0; slot < config_.world_size; ++slot)
        if (segment_.newest_instance(slot) != nullptr) have.add(slot);
    return share_memory(have);
}

Status Job::ask_for_segment(const std::string& socket, std::uint64_t nonce, Time until) {
    int fd = -1;
    auto status = asker_.ask(socket, nonce, key_, config_.rank, config_.incarnation, true, until, stop_event_, &fd);
    asker_.close();
    return status ? segment_.open(fd, job_hash_, boot_, config_.world_size) : status;
}

// OK without a segment: nobody is left.
Status Job::ask_the_living() {
    for (const auto& a : addresses_) {
        if (a.job != job_hash_ || a.domain != own_.domain || a.rank == config_.rank || a.socket.empty()) continue;
        Status status;
        do {  // one that is stopped may go on, or be voted out: until then its memory is the host's
            status = ask_for_segment(a.socket, a.nonce, std::min(deadline_, IoLoop::now() + 2 * config_.heartbeat));
        } while (needs_memory() && status.code == Code::Timeout && IoLoop::now() < deadline_ && is_member(a));
        if (status || status.code == Code::Closed) return status;
        if (needs_memory() && status.code == Code::Timeout && IoLoop::now() >= deadline_)
            return std::move(status).within("rank " + std::to_string(a.rank));
    }
    return {};
}

bool Job::is_member(const Address& address) {
    if (!config_.has_store) return true;
    Bytes now;
    if (!read_view(&now)) return true;
    const auto view = JobView::decode(now);
    return !view || view->is_alive(address.rank, address.incarnation);
}

// Not where the job's decisions were in the segment of those who died: whoever has that one must give it.
Status Job::make_segment() {
    Bytes now;
    if (!config_.has_store || !read_view(&now)) return no_answer();
    FT_POINT("join.make");
    if (auto s = segment_.create(job_hash_, boot_, config_.world_size); !s) return s;
    segment_.header().authority = shm::kInStore;
    return {};
}

}  // namespace ftcomm
