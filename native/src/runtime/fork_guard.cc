#include "runtime/fork_guard.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "base/check.h"

namespace ftcomm::fork_guard {
namespace {

// Never destroyed: a fork may happen while the process runs its exit handlers.
struct Registry {
    std::mutex mutex;  // outermost: taken before any engine's
    std::vector<ForkSensitive*> engines;
};
Registry& registry() {
    static auto* r = new Registry;
    return *r;
}

std::atomic<std::uint64_t> forks{0};

void before() {
    registry().mutex.lock();
    for (auto* engine : registry().engines) engine->lock_for_fork();
}

void in_parent() {
    for (auto* engine : registry().engines) engine->unlock_after_fork();
    registry().mutex.unlock();
}

void in_child() {
    forks.fetch_add(1, std::memory_order_relaxed);
    for (auto* engine : registry().engines) engine->close_in_child();
    registry().engines.clear();
    registry().mutex.unlock();
}

}  // namespace

void add(ForkSensitive* engine) {
    static const int installed = pthread_atfork(before, in_parent, in_child);
    FT_CHECK(installed == 0, "pthread_atfork failed with %d", installed);
    std::lock_guard hold(registry().mutex);
    registry().engines.push_back(engine);
}

void remove(ForkSensitive* engine) {
    std::lock_guard hold(registry().mutex);
    std::erase(registry().engines, engine);
}

std::uint64_t generation() { return forks.load(std::memory_order_relaxed); }

}  // namespace ftcomm::fork_guard
