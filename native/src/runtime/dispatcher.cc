#include "runtime/dispatcher.h"

#include <utility>

#include "runtime/signals.h"

namespace ftcomm {

void Dispatcher::post(std::function<void()> fn) {
    std::lock_guard hold(shared_->mutex);
    if (shared_->stopping) return;
    shared_->queue.push_back(std::move(fn));
    if (!thread_.joinable()) {
        BlockSignals blocked;
        thread_ = std::thread([shared = shared_] { run(shared); });
    }
    shared_->changed.notify_one();
}

void Dispatcher::run(const std::shared_ptr<Shared>& shared) {
    ::pthread_setname_np(::pthread_self(), "ftcomm-callback");
    std::unique_lock hold(shared->mutex);
    for (;;) {
        shared->changed.wait(hold, [&] { return shared->stopping || !shared->queue.empty(); });
        if (shared->queue.empty()) return;
        auto batch = std::exchange(shared->queue, {});
        hold.unlock();
        for (auto& fn : batch) {
            fn();
            fn = nullptr;  // captures may own a job's last reference: let go one by one, unlocked
        }
        hold.lock();
    }
}

void Dispatcher::stop() {
    {
        std::lock_guard hold(shared_->mutex);
        shared_->stopping = true;
        shared_->changed.notify_one();
    }
    if (!thread_.joinable()) return;
    if (on_thread()) thread_.detach();
    else thread_.join();
}

bool Dispatcher::on_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

}  // namespace ftcomm
