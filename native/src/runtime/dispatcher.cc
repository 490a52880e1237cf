#include "runtime/dispatcher.h"

#include <chrono>
#include <utility>

#include "base/check.h"
#include "runtime/thread.h"

namespace ftcomm {

namespace {
constexpr std::chrono::milliseconds kSoon(20);
}

Status Dispatcher::start() {
    return start_thread(&thread_, "ftcomm-callback", [shared = shared_] { run(shared); });
}

void Dispatcher::post(std::function<void()> fn) { push(std::move(fn), true); }
void Dispatcher::post_soon(std::function<void()> fn) { push(std::move(fn), false); }

void Dispatcher::push(std::function<void()> fn, bool urgent) {
    std::lock_guard hold(shared_->mutex);
    if (shared_->stopping) return;
    FT_CHECK(thread_.joinable(), "something is posted to a dispatcher that was not started");
    const bool wake = urgent || shared_->queue.empty();
    shared_->queue.push_back(std::move(fn));
    shared_->urgent |= urgent;
    if (wake) shared_->changed.notify_one();
}

void Dispatcher::run(const std::shared_ptr<Shared>& shared) {
    std::unique_lock hold(shared->mutex);
    for (;;) {
        shared->changed.wait(hold, [&] { return shared->stopping || !shared->queue.empty(); });
        if (shared->queue.empty()) return;
        shared->changed.wait_for(hold, kSoon, [&] { return shared->stopping || shared->urgent; });
        shared->urgent = false;
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
