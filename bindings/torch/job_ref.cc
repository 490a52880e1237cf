#include "job_ref.h"

#include <mutex>
#include <utility>

namespace ftcomm_torch {

JobRef::JobRef(ft_job* job, std::function<void()> on_unused)
    : job_(job), pointer_(reinterpret_cast<std::uintptr_t>(job)), on_unused_(std::move(on_unused)) {}

void JobRef::retire() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    job_ = nullptr;
}

bool JobRef::closed() {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return job_ == nullptr;
}

void JobRef::attach() {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    ++groups_;
}

void JobRef::detach(bool tell) {
    bool last = false;
    {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        last = --groups_ == 0 && job_ != nullptr;
    }
    if (last && tell) on_unused_();
}

}  // namespace ftcomm_torch
