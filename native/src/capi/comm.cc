#include <algorithm>
#include <cstring>

#include "base/failpoint.h"
#include "base/fault_tolerance.h"
#include "base/json.h"
#include "capi/post.h"
#include "runtime/json.h"

using namespace ftcomm;
using namespace ftcomm::capi;

namespace {

// Posts under the lock, wraps the request outside.
template <class F>
int post(ft_job* job, bool survivors, ft_request** out, F f, bool waits = false) {
    if (out == nullptr) return fail(Code::Invalid, "out must not be NULL");
    RequestPtr request;
    bool open = false;
    int rc = with_node(job, [&](Node& node) {
        auto& engine = job->job->engine();
        if (waits) engine.hold_bells();
        request = f(node);
        open = waits && !request->done.load(std::memory_order_relaxed);
        if (open) engine.will_wait(*request);
        return int{FT_OK};
    });
    if (rc != FT_OK) return rc;
    rc = guarded([&] { return give(job, std::move(request), survivors, out); });
    if (rc == FT_OK) (*out)->held = open;
    else if (open) Engine::Hold rings(job->job->engine());
    return rc;
}

int give_tags(const std::vector<std::string>& tags, char* out, size_t cap, size_t* needed) {
    Json j;
    j.begin_list();
    for (const auto& tag : tags) j.text(tag);
    j.end_list();
    const auto& text = j.str();
    *needed = text.size();
    if (text.size() < cap) std::memcpy(out, text.c_str(), text.size() + 1);
    return FT_OK;
}

}  // namespace

extern "C" {

int ft_comm_create(ft_job* job, uint64_t id, const char* name, const int32_t* slots, int32_t size, int32_t policy,
                   double timeout) {
    return with_node(job, [&](Node& node) {
        if (size < 1 || size > job->job->config().world_size || slots == nullptr)
            return fail(Code::Invalid, "a communicator has from 1 to world size members");
        if (policy < FT_RAISE || policy > FT_REPLAY) return fail(Code::Invalid, "policy is none of raise, lossy, replay");
        if (!kFaultTolerant && policy != FT_RAISE)
            return fail(Code::Unsupported,
                        "this libftcomm is built without fault tolerance, for benchmarks: it has no policy but raise");
        CommSpec spec;
        spec.id = id;
        spec.name = name != nullptr ? name : "";
        RankSet seen;
        for (int32_t i = 0; i < size; ++i) {
            if (slots[i] < 0 || slots[i] >= job->job->config().world_size || seen.has(slots[i]))
                return fail(Code::Invalid, "member " + std::to_string(slots[i]) + " is out of range or there twice");
            seen.add(slots[i]);
            spec.members.push_back(slots[i]);
        }
        spec.policy = static_cast<Policy>(policy);
        spec.timeout = seconds_or_default(timeout);
        auto s = node.create_comm(IoLoop::now(), spec);
        return s ? int{FT_OK} : fail(s);
    });
}

int ft_comm_ready(ft_job* job, ft_comm comm, ft_request** out) {
    return post(job, false, out, [&](Node& node) { return node.comm_ready(IoLoop::now(), comm); });
}

int ft_comm_close(ft_job* job, ft_comm comm) {
    return with_node(job, [&](Node& node) { return node.close_comm(IoLoop::now(), comm), int{FT_OK}; });
}

int ft_comm_revoke(ft_job* job, ft_comm comm) {
    return with_node(job, [&](Node& node) { return node.revoke(IoLoop::now(), comm), int{FT_OK}; });
}

int ft_comm_revoked(ft_job* job, ft_comm comm) {
    int revoked = 0;
    with_node(job, [&](Node& node) { return revoked = node.comm_revoked(comm) ? 1 : 0, int{FT_OK}; });
    return revoked;
}

int ft_comm_alive(ft_job* job, ft_comm comm, uint8_t* flags) {
    return with_node(job, [&](Node& node) {
        put_flags(node.comm_alive(comm), flags, static_cast<size_t>(node.comm_size(comm)));
        return int{FT_OK};
    });
}

int ft_comm_failed(ft_job* job, ft_comm comm, int32_t* ranks, int32_t* n) {
    return with_node(job, [&](Node& node) {
        const auto failed = node.comm_failed(comm);
        std::copy(failed.begin(), failed.end(), ranks);
        *n = static_cast<int32_t>(failed.size());
        return int{FT_OK};
    });
}

int ft_comm_ack_failed(ft_job* job, ft_comm comm, int32_t n) {
    return with_node(job, [&](Node& node) { return node.ack_failed(comm, n), int{FT_OK}; });
}

int ft_comm_solo(ft_job* job, ft_comm comm) {
    int solo = 0;
    with_node(job, [&](Node& node) { return solo = node.comm_solo(comm) ? 1 : 0, int{FT_OK}; });
    return solo;
}

uint64_t ft_comm_seq(ft_job* job, ft_comm comm) {
    uint64_t seq = 0;
    with_node(job, [&](Node& node) { return seq = node.comm_seq(comm), int{FT_OK}; });
    return seq;
}

int ft_comm_resume(ft_job* job, ft_comm comm, const char* tag, ft_request** out) {
    return post(job, false, out, [&](Node& node) { return node.comm_resume(IoLoop::now(), comm, tag != nullptr ? tag : ""); });
}

int ft_comm_resume_noted(ft_job* job, ft_comm comm, const char* tag, ft_request** out) {
    if (tag == nullptr) return fail(Code::Invalid, "a note has a tag");
    return post(job, false, out, [&](Node& node) { return node.comm_resume_noted(IoLoop::now(), comm, tag); });
}

int ft_comm_note(ft_job* job, ft_comm comm, const char* tag) {
    if (tag == nullptr) return fail(Code::Invalid, "a note has a tag");
    return with_node(job, [&](Node& node) {
        auto s = node.comm_note(IoLoop::now(), comm, tag);
        return s ? int{FT_OK} : fail(s);
    });
}

int ft_job_flush_log(ft_job* job) {
    return with_node(job, [&](Node& node) {
        auto s = node.flush_log(IoLoop::now());
        return s ? int{FT_OK} : fail(s);
    });
}

int ft_comm_commit(ft_job* job, ft_comm comm, const char* tag, ft_request** out) {
    if (tag == nullptr || *tag == 0) return fail(Code::Invalid, "a checkpoint needs a tag");
    return post(job, false, out, [&](Node& node) { return node.comm_commit(IoLoop::now(), comm, tag); });
}

int ft_comm_log_position(ft_job* job, ft_comm comm, uint64_t iteration, int64_t micro_batch) {
    return with_node(job, [&](Node& node) {
        std::optional<std::uint32_t> given;
        if (micro_batch >= 0) given = static_cast<std::uint32_t>(std::min<int64_t>(micro_batch, ~std::uint32_t{0}));
        node.comm_log_position(comm, iteration, given);
        return int{FT_OK};
    });
}

int ft_comm_hollow(ft_job* job, ft_comm comm, int on) {
    return with_node(job, [&](Node& node) {
        return node.comm_hollow(comm, on != 0) ? int{FT_OK} : fail(Code::Invalid, "only under the policy replay");
    });
}

int ft_comm_ahead(ft_job* job, ft_comm comm, char* out, size_t cap, size_t* needed) {
    return with_node(job, [&](Node& node) {
        const auto ahead = node.comm_ahead(comm);
        if (!ahead) return fail(Code::Invalid, "only under the policy replay");
        const auto text = JsonObject()
                              .add("operations", ahead->operations)
                              .raw("sent", json_value(ahead->sent))
                              .raw("received", json_value(ahead->received))
                              .raw("sends_left", json_value(ahead->sends_left))
                              .raw("receives_left", json_value(ahead->receives_left))
                              .text();
        *needed = text.size();
        if (text.size() < cap) std::memcpy(out, text.c_str(), text.size() + 1);
        return int{FT_OK};
    });
}

int ft_comm_logged(ft_job* job, ft_comm comm, int dst, uint64_t n, uint64_t* bytes, uint32_t* crc) {
    return with_node(job, [&](Node& node) {
        LogRecord found;
        if (const auto status = node.comm_logged(comm, dst, n, &found); !status) return fail(status);
        *bytes = found.payload.size();
        *crc = found.crc.value_or(0);
        return int{FT_OK};
    });
}

int ft_comm_checkpoints(ft_job* job, ft_comm comm, char* out, size_t cap, size_t* needed) {
    return with_node(job, [&](Node& node) { return give_tags(node.comm_checkpoints(comm), out, cap, needed); });
}

int ft_comm_notes(ft_job* job, ft_comm comm, char* out, size_t cap, size_t* needed) {
    return with_node(job, [&](Node& node) { return give_tags(node.comm_notes(comm), out, cap, needed); });
}

int ft_collective(ft_job* job, ft_comm comm, const ft_op* op, ft_request** out) {
    if (int rc = check_op(op); rc != FT_OK) return rc;
    return post(
        job, false, out, [&](Node& node) { return node.collective(IoLoop::now(), comm, described(*op, node.comm_size(comm))); },
        op->waits != 0);
}

int ft_send(ft_job* job, ft_comm comm, const void* data, uint64_t bytes, int32_t dst, int64_t tag, ft_request** out) {
    return post(job, false, out, [&](Node& node) { return node.send(IoLoop::now(), comm, data, bytes, dst, tag); });
}

int ft_recv(ft_job* job, ft_comm comm, void* data, uint64_t bytes, int32_t src, int64_t tag, ft_request** out) {
    return post(job, false, out, [&](Node& node) { return node.recv(IoLoop::now(), comm, data, bytes, src, tag); });
}

int ft_agree(ft_job* job, ft_comm comm, int64_t flag, ft_request** out) {
    return post(job, false, out, [&](Node& node) { return node.agree(IoLoop::now(), comm, flag); });
}

int ft_shrink(ft_job* job, ft_comm comm, ft_request** out) {
    return post(job, true, out, [&](Node& node) { return node.shrink(IoLoop::now(), comm); });
}

int ft_join_wait(ft_job* job, ft_request** out) {
    return post(job, true, out, [&](Node& node) { return node.join_wait(IoLoop::now()); });
}

int ft_admit(ft_job* job, ft_request** out) {
    return post(job, true, out, [&](Node& node) { return node.admit(IoLoop::now()); });
}

}  // extern "C"
