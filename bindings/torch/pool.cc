#include "pool.h"

#include <pthread.h>

#include <exception>
#include <thread>
#include <utility>

#include <c10/util/Logging.h>

#include "../../native/src/runtime/signals.h"

namespace ftcomm_torch {
namespace {

Pool* g_pool = nullptr;
std::once_flag g_once;

}  // namespace

Pool& Pool::get() {
    // Never destroyed: its threads may outlive main(). A forked child has none of them and gets a pool of its own.
    std::call_once(g_once, [] {
        g_pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { g_pool = new Pool; });
    });
    return *g_pool;
}

void Pool::run(std::function<void()> task) {
    bool start = false;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push_back(std::move(task));
        start = idle_ < tasks_.size();
    }
    if (!start) {
        wake_.notify_one();
        return;
    }
    const ftcomm::BlockSignals block;
    std::thread([this] { work(); }).detach();
}

void Pool::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        while (tasks_.empty()) {
            ++idle_;
            wake_.wait(lock);
            --idle_;
        }
        auto task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        try {
            task();
        } catch (const std::exception& e) { LOG(ERROR) << "ftcomm: the end of an operation failed: " << e.what(); }
        task = nullptr;  // what it holds goes without the lock
        lock.lock();
    }
}

}  // namespace ftcomm_torch
