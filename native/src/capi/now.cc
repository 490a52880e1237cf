// Calls that wait: one of C for what nearly every operation needs, and no request that somebody has to free.
#include "capi/post.h"

using namespace ftcomm;
using namespace ftcomm::capi;

namespace {

// An all-gather as nearly always: a part of each rank, all of one size.
bool has_part_of_each(const std::vector<Chunk>& chunks, int size) {
    if (chunks.size() != static_cast<std::size_t>(size)) return false;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
        const auto& chunk = chunks[i];
        if (chunk.count != chunks[0].count || chunk.offset != i * chunk.count ||
            !(chunk.contributors == RankSet::only(static_cast<int>(i))))
            return false;
    }
    return true;
}

// Done without an error, and nothing in it that ft_now has no room for.
bool is_plain(const Request& r, int size, const ft_op* op) {
    const auto& o = r.outcome;
    if (op == nullptr) return true;
    if (op->kind == FT_BROADCAST && o.chunks.size() == 1)
        return o.contributors == RankSet::only(op->root) && o.chunks[0].contributors == o.contributors;
    if (!(o.contributors == RankSet::first(size))) return false;
    return o.chunks.size() <= 1 || (op->kind == FT_ALL_GATHER && has_part_of_each(o.chunks, size));
}

// `op`: the collective that is posted, or null: a message.
template <class F>
int finish(ft_job* job, double timeout, ft_now* out, const ft_op* op, F post) {
    *out = {};
    out->only = -1;
    const auto now = IoLoop::now();
    if (int rc = check(job); rc != FT_OK) return rc;
    const auto held = job->job;  // another thread may close the job, and with it the handle, while this one waits
    const auto generation = job->generation;
    thread_local RequestPtr spare;
    RequestPtr request;
    int size = 0;
    bool done = false;
    int rc = with_node(job, [&](Node& node) {
        auto& engine = held->engine();
        node.reuse(std::move(spare));
        engine.hold_bells();
        size = post(node, now, &request);
        engine.will_wait(*request);
        const auto limit = seconds_or_default(timeout);
        // In one turn with the lock: a second one would cost some 30 ns.
        done = engine.wait_locked(request, limit > 0 ? now + limit : 0, now) == Engine::Wait::Done;
        return int{FT_OK};
    });
    if (rc != FT_OK) return rc;
    return guarded([&] {
        if (!done || !request->status || !is_plain(*request, size, op)) {
            out->request = new ft_request{held, std::move(request), generation, false};
            const int waited = ft_request_wait(out->request, 0);
            return waited == FT_OK ? FT_LOOK : waited;
        }
        const auto& outcome = request->outcome;
        out->epoch = outcome.epoch;
        out->chunks = static_cast<int32_t>(outcome.chunks.size());
        if (!outcome.chunks.empty()) {
            out->offset = outcome.chunks.front().offset;
            out->count = outcome.chunks.front().count;
        }
        if (op != nullptr && op->kind == FT_BROADCAST && !outcome.chunks.empty()) out->only = op->root;
        out->source = request->source;
        out->bytes = request->bytes;
        // Who completed it may still be about to let go of it; with the engine's lock, which the next call takes before it writes to it.
        if (request.use_count() == 1) spare = std::move(request);
        return int{FT_OK};
    });
}

}  // namespace

extern "C" {

int ft_collective_now(ft_job* job, ft_comm comm, const ft_op* op, double timeout, ft_now* out) {
    if (int rc = check_op(op); rc != FT_OK) return rc;
    return finish(job, timeout, out, op, [&](Node& node, Time now, RequestPtr* request) {
        const int size = node.comm_size(comm);
        *request = node.collective(now, comm, described(*op, size));
        return size;
    });
}

int ft_send_now(ft_job* job, ft_comm comm, const void* data, uint64_t bytes, int32_t dst, int64_t tag, double timeout,
                ft_now* out) {
    return finish(job, timeout, out, nullptr, [&](Node& node, Time now, RequestPtr* request) {
        *request = node.send(now, comm, data, bytes, dst, tag);
        return 0;
    });
}

int ft_recv_now(ft_job* job, ft_comm comm, void* data, uint64_t bytes, int32_t src, int64_t tag, double timeout, ft_now* out) {
    return finish(job, timeout, out, nullptr, [&](Node& node, Time now, RequestPtr* request) {
        *request = node.recv(now, comm, data, bytes, src, tag);
        return 0;
    });
}

}  // extern "C"
