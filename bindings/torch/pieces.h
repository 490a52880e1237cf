// Waits in pieces: a signal that comes after this thread has last looked for one, and before it sleeps, wakes nobody.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>

#include <pybind11/pybind11.h>

namespace ftcomm_torch {

constexpr double kPiece = 0.5;  // seconds

// What a Python signal handler raised (KeyboardInterrupt), if a signal came and this is the thread that handles it.
inline std::exception_ptr python_interrupt() {
    if (Py_IsInitialized() == 0) return nullptr;
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return nullptr;
    return std::make_exception_ptr(pybind11::error_already_set());
}

struct Waited {
    bool ready = false;  // else its time is over, or it was interrupted
    std::exception_ptr interrupt = nullptr;
};

// Until `ready()`, with the lock; without it where that did not come about. `limit`: seconds, 0: none.
template <class Ready>
Waited wait_in_pieces(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double limit, Ready ready) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    while (!changed.wait_for(lock, std::chrono::duration<double>(kPiece), ready)) {
        lock.unlock();
        if (auto interrupt = python_interrupt()) return {false, std::move(interrupt)};
        if (limit > 0 && std::chrono::duration<double>(Clock::now() - start).count() >= limit) return {};
        lock.lock();
    }
    return {true};
}

}  // namespace ftcomm_torch
