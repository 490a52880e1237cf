// How the library's threads are started.
#pragma once

#include <pthread.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"
#include "runtime/signals.h"

namespace ftcomm {

// A process may be allowed no more of them. So a thread is started where its caller can be told, before anybody relies on it, and not by the
// first who needs it, perhaps under the engine's lock.
template <class F>
[[nodiscard]] Status start_thread(std::thread* out, const char* name, F run) {
    const BlockSignals blocked;
    try {
        *out = std::thread([name, run = std::move(run)]() mutable {
            pthread_setname_np(pthread_self(), name);
            run();
        });
    } catch (const std::system_error& e) {
        return Status::error(Code::System, std::string("the thread ") + name + " could not be started: " + e.what() +
                                               " (see ulimit -u, ulimit -v, and the limits of a container)");
    }
    return {};
}

}  // namespace ftcomm
