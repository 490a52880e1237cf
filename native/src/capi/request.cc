#include <algorithm>
#include <cmath>

#include "capi/handle.h"

using namespace ftcomm;
using namespace ftcomm::capi;

namespace {

bool is_done(const ft_request* r) { return r->request->done.load(std::memory_order_acquire); }

int result(const ft_request* r) { return r->request->status ? int{FT_OK} : fail(r->request->status); }

int check_done(const ft_request* r) {
    if (int rc = check(r); rc != FT_OK) return rc;
    return is_done(r) ? int{FT_OK} : fail(Code::Invalid, "the request is not done yet: wait for it first");
}

// The caller does not wait for it, for now or at all.
void ring(ft_request* r) {
    if (!r->held.load(std::memory_order_relaxed) || !r->held.exchange(false)) return;
    auto& engine = r->job->engine();
    engine.lock_urgently();
    engine.unlock();
}

}  // namespace

extern "C" {

int ft_request_wait(ft_request* r, double timeout) {
    return guarded([&] {
        if (int rc = check(r); rc != FT_OK) return rc;
        Time deadline = 0;
        if (timeout >= 0 && timeout < 1e9) deadline = IoLoop::now() + static_cast<Time>(timeout * 1e9);
        switch (r->job->engine().wait(r->request, deadline, 0, r->held.exchange(false))) {
            case Engine::Wait::Done: return result(r);
            case Engine::Wait::Timeout: return fail(Code::Timeout, "the request is not done yet: wait again, or give it up");
            case Engine::Wait::Interrupted: return fail(Code::Interrupted, "a signal came: wait again, or give the request up");
            case Engine::Wait::Alarmed: {
                Engine::Hold hold(r->job->engine());
                return is_done(r) ? result(r) : fail(r->request->alarm);
            }
            case Engine::Wait::Closed: break;
        }
        return fail(Code::Closed, "the job was closed before the operation was done");
    });
}

int ft_request_finish(ft_request* r, double timeout, ft_result* out, uint8_t* flags, size_t size) {
    int rc = ft_request_wait(r, timeout);
    if (rc != FT_OK) return rc;
    ft_request_result(r, out);
    return ft_request_ranks(r, flags, size);
}

int ft_request_test(ft_request* r, int32_t* done) {
    if (int rc = check(r); rc != FT_OK) return rc;
    ring(r);
    *done = is_done(r) ? 1 : 0;
    if (*done != 0) return result(r);
    return r->job->running() ? int{FT_OK} : fail(Code::Closed, "the job was closed before the operation was done");
}

int ft_request_fail(ft_request* r, int32_t why) {
    return guarded([&] {
        if (int rc = check(r); rc != FT_OK) return rc;
        if (why != FT_INTERRUPTED && why != FT_TIMEOUT && why != FT_CANCELLED)
            return fail(Code::Invalid, "why is one of FT_INTERRUPTED, FT_TIMEOUT, FT_CANCELLED");
        if (is_done(r) || !r->job->running()) return int{FT_OK};
        auto& engine = r->job->engine();
        Engine::Hold hold(engine);
        if (engine.has_node()) engine.node().fail_request(IoLoop::now(), r->request, static_cast<Code>(why));
        return int{FT_OK};
    });
}

int ft_request_on_done(ft_request* r, void (*fn)(void* context), void* context) {
    return guarded([&] {
        if (int rc = check(r); rc != FT_OK) return rc;
        if (!r->job->engine().on_done(r->request, [fn, context] { fn(context); })) fn(context);
        return int{FT_OK};
    });
}

void ft_request_free(ft_request* r) {
    if (r == nullptr || r->generation != fork_guard::generation()) return;
    ring(r);
    delete r;
}

int ft_request_result(ft_request* r, ft_result* out) {
    if (int rc = check_done(r); rc != FT_OK) return rc;
    const auto& q = *r->request;
    *out = {q.source, q.bytes, q.outcome.epoch, q.value, q.new_comm, static_cast<int32_t>(q.outcome.chunks.size()), 0, 0};
    if (!q.outcome.chunks.empty()) {
        out->offset = q.outcome.chunks.front().offset;
        out->count = q.outcome.chunks.front().count;
    }
    return FT_OK;
}

int ft_request_ranks(ft_request* r, uint8_t* flags, size_t size) {
    if (int rc = check_done(r); rc != FT_OK) return rc;
    put_flags(r->survivors ? r->request->survivors : r->request->outcome.contributors, flags, size);
    return FT_OK;
}

int ft_request_chunk(ft_request* r, int32_t index, uint64_t* offset, uint64_t* count, uint8_t* flags, size_t size) {
    if (int rc = check_done(r); rc != FT_OK) return rc;
    const auto& chunks = r->request->outcome.chunks;
    if (index < 0 || static_cast<size_t>(index) >= chunks.size()) return fail(Code::Invalid, "there is no such chunk");
    const auto& chunk = chunks[static_cast<size_t>(index)];
    *offset = chunk.offset;
    *count = chunk.count;
    put_flags(chunk.contributors, flags, size);
    return FT_OK;
}

}  // extern "C"
