#include <algorithm>
#include <cmath>
#include <cstring>

#include "capi/handle.h"

using namespace ftcomm;
using namespace ftcomm::capi;

namespace {

// Longer than any job: what a timeout of "forever" means.
Time to_time(double seconds) {
    if (!std::isfinite(seconds) || seconds > 1e9) return static_cast<Time>(1e18);
    return static_cast<Time>(std::max(seconds, 0.0) * 1e9);
}

}  // namespace

extern "C" {

int ft_job_create(const ft_job_config* config, ft_job** out) {
    return guarded([&] {
        if (config == nullptr || out == nullptr) return fail(Code::Invalid, "config and out must not be NULL");
        *out = nullptr;
        JobConfig read;
        if (auto s = JobConfig::read(*config, &read); !s) return fail(s);
        auto job = std::make_shared<Job>(std::move(read));
        if (auto s = job->prepare(); !s) return fail(s);
        *out = new ft_job{std::move(job), fork_guard::generation()};
        return int{FT_OK};
    });
}

int ft_job_address(ft_job* job, const uint8_t** data, size_t* length) {
    if (int rc = check(job); rc != FT_OK) return rc;
    const auto& blob = job->job->address();
    *data = reinterpret_cast<const uint8_t*>(blob.data());
    *length = blob.size();
    return FT_OK;
}

int ft_job_start(ft_job* job, const uint8_t* const* addresses, const size_t* lengths, uint64_t boot_nonce, int32_t joining,
                 double timeout) {
    return guarded([&] {
        if (int rc = check(job); rc != FT_OK) return rc;
        if (addresses == nullptr || lengths == nullptr) return fail(Code::Invalid, "addresses and lengths must not be NULL");
        std::vector<Bytes> blobs;
        for (int r = 0; r < job->job->config().world_size; ++r) {
            const auto* p = reinterpret_cast<const std::byte*>(addresses[r]);
            blobs.emplace_back(p, p + (p != nullptr ? lengths[r] : 0));
        }
        auto s = job->job->start(std::move(blobs), boot_nonce, joining != 0, to_time(timeout));
        return s ? int{FT_OK} : fail(s);
    });
}

int ft_job_unlogged(ft_job* job) {
    if (int rc = check(job); rc != FT_OK) return rc;
    job->job->set_unlogged();
    return FT_OK;
}

int ft_job_leave(ft_job* job, double timeout) {
    return guarded([&] {
        if (int rc = check_running(job); rc != FT_OK) return rc;
        auto s = job->job->leave(timeout < 0 ? 0 : std::max<Time>(to_time(timeout), 1));
        return s ? int{FT_OK} : fail(s);
    });
}

void ft_job_close(ft_job* job) {
    // In a forked child there are no threads to join and no memory to unmap; its copy of the bookkeeping stays.
    if (job == nullptr || job->generation != fork_guard::generation()) return;
    job->job->close();
    delete job;
}

int ft_job_info(ft_job* job, char* out, size_t cap) {
    return guarded([&] {
        if (int rc = check(job); rc != FT_OK) return rc;
        auto json = job->job->info_json();
        if (cap > 0 && out != nullptr) {
            auto n = std::min(json.size(), cap - 1);
            std::memcpy(out, json.data(), n);
            out[n] = 0;
        }
        return int{FT_OK};
    });
}

uint64_t ft_job_epoch(ft_job* job) {
    if (check_running(job) != FT_OK) return 0;
    Engine::Hold hold(job->job->engine());
    if (check_node(job) != FT_OK) return 0;
    return job->job->engine().node().epoch();
}

int ft_job_alive(ft_job* job, uint8_t* flags) {
    if (int rc = check_running(job); rc != FT_OK) return rc;
    Engine::Hold hold(job->job->engine());
    if (int rc = check_node(job); rc != FT_OK) return rc;
    put_flags(job->job->engine().node().alive_slots(), flags, static_cast<size_t>(job->job->config().world_size));
    return FT_OK;
}

int ft_job_waiting(ft_job* job, uint8_t* flags) {
    if (int rc = check_running(job); rc != FT_OK) return rc;
    Engine::Hold hold(job->job->engine());
    if (int rc = check_node(job); rc != FT_OK) return rc;
    put_flags(job->job->engine().node().waiting_slots(), flags, static_cast<size_t>(job->job->config().world_size));
    return FT_OK;
}

int ft_job_tell(ft_job* job, int32_t all) {
    if (int rc = check(job); rc != FT_OK) return rc;
    job->job->tell(all != 0);
    return FT_OK;
}

int ft_job_stale(ft_job* job) {
    if (check_running(job) != FT_OK) return 0;
    Engine::Hold hold(job->job->engine());
    if (check_node(job) != FT_OK) return 0;
    const auto& node = job->job->engine().node();
    return node.left_with_group() ? 2 : node.stale() ? 1 : 0;
}

}  // extern "C"
