// The native job under all process groups of this process.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <shared_mutex>

#include "ftcomm/ftcomm.h"

namespace ftcomm_torch {

// Python owns the ft_job; groups reach it through this, so that a group which outlives the job finds it closed.
class JobRef {
public:
    // on_unused: the last group was shut down (called without locks and without the GIL).
    JobRef(ft_job* job, std::function<void()> on_unused);

    // Runs fn(job) while the job can't be closed; FT_CLOSED without calling it when it is closed already.
    template <class F>
    int with(F&& fn) {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        return job_ == nullptr ? static_cast<int>(FT_CLOSED) : fn(job_);
    }
    // Python is about to close the job: no new call gets through afterwards.
    void retire();
    bool closed();

    std::uintptr_t pointer() const { return pointer_; }  // identifies the job, also a closed one

    void attach();
    void detach(bool tell);

private:
    std::shared_mutex mutex_;
    ft_job* job_;
    const std::uintptr_t pointer_;
    int groups_ = 0;
    std::function<void()> on_unused_;
};

}  // namespace ftcomm_torch
