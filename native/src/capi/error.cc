#include "capi/handle.h"
#include "runtime/json.h"

namespace ftcomm::capi {
namespace {

thread_local std::string last_error;

constexpr const char* kForked = "this process was forked from an ftcomm rank; call ftcomm.init in it anew";

}  // namespace

int fail(const Status& status) {
    Json j;
    j.begin();
    j.key("code").number(static_cast<int>(status.code)).key("name").text(to_string(status.code));
    j.key("message").text(status.message).key("operation").text(status.operation);
    j.key("ranks").numbers(status.ranks);
    j.key("evidence").begin_list();
    for (auto e : status.evidence) j.text(to_string(e));
    j.end_list().key("epoch").number(status.epoch).end();
    last_error = j.str();
    return static_cast<int>(status.code);
}

int fail(Code code, const std::string& message) { return fail(Status::error(code, message)); }

int check(const ft_job* job) {
    if (job == nullptr) return fail(Code::Invalid, "the job handle is NULL");
    if (job->generation != fork_guard::generation()) return fail(Code::Closed, kForked);
    return FT_OK;
}

int check(const ft_request* request) {
    if (request == nullptr) return fail(Code::Invalid, "the request handle is NULL");
    if (request->generation != fork_guard::generation()) return fail(Code::Closed, kForked);
    return FT_OK;
}

namespace {
int not_running() { return fail(Code::Closed, "the job is not running: it was not started, or was left or closed"); }
}  // namespace

int check_running(const ft_job* job) {
    if (int rc = check(job); rc != FT_OK) return rc;
    return job->job->running() ? FT_OK : not_running();
}

int check_node(const ft_job* job) { return job->job->engine().has_node() ? FT_OK : not_running(); }

int give(ft_job* job, RequestPtr request, bool survivors, ft_request** out) {
    *out = new ft_request{job->job, std::move(request), job->generation, survivors};
    return FT_OK;
}

void put_flags(const RankSet& set, std::uint8_t* flags, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) flags[i] = set.has(static_cast<int>(i)) ? 1 : 0;
}

}  // namespace ftcomm::capi

extern "C" const char* ft_last_error(void) { return ftcomm::capi::last_error.c_str(); }
