#include "pool.h"

#include <pthread.h>

#include <chrono>
#include <exception>
#include <system_error>
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
    std::unique_lock<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ < tasks_.size() && start()) return;
    if (threads_ == 0) {  // nor will there be one: here, then
        task = std::move(tasks_.back());
        tasks_.pop_back();
        lock.unlock();
        return task();
    }
    lock.unlock();
    wake_.notify_one();
}

// With mutex_. False: the system has no more threads for this process.
bool Pool::start() {
    const ftcomm::BlockSignals block;
    try {
        std::thread([this] { work(); }).detach();
    } catch (const std::system_error& e) {
        LOG(WARNING) << "ftcomm: no thread can be started to finish operations: " << e.what();
        return false;
    }
    ++threads_;
    return true;
}

void Pool::settle(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    settled_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return tasks_.empty() && idle_ == threads_; });
}

void Pool::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        while (tasks_.empty()) {
            ++idle_;
            if (idle_ == threads_) settled_.notify_all();
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
