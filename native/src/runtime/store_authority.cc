#include "runtime/store_authority.h"

#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/check.h"
#include "runtime/thread.h"

namespace ftcomm {
namespace {

constexpr std::size_t kFirstCapacity = 64u << 10;
constexpr std::size_t kMaxValue = 64u << 20;  // a store that claims more is broken

std::string boot_key(const std::string& job) { return job + "/boot"; }

std::string boot_text(std::uint64_t boot) {
    std::string out(16, '0');
    for (std::size_t i = 0; i < 16; ++i) out[15 - i] = "0123456789abcdef"[(boot >> (4 * i)) & 15];
    return out;
}

// False: not a nonce as boot_text writes it.
bool parse_boot(const Bytes& value, std::uint64_t* boot) {
    const auto* begin = reinterpret_cast<const char*>(value.data());
    const auto [end, error] = std::from_chars(begin, begin + value.size(), *boot, 16);
    return value.size() == 16 && error == std::errc() && end == begin + value.size();
}

Bytes bytes_of(const std::string& s) {
    const auto v = std::as_bytes(std::span(s.data(), s.size()));
    return {v.begin(), v.end()};
}

// The store's value of `key`, empty when missing. False: the store failed.
bool get(const ft_store& store, const std::string& key, Bytes* out) {
    out->resize(kFirstCapacity);
    for (int round = 0; round < 8; ++round) {
        const auto n = store.get(store.context, key.c_str(), reinterpret_cast<std::uint8_t*>(out->data()), out->size());
        if (n < 0 || static_cast<std::uint64_t>(n) > kMaxValue) return false;
        const auto length = static_cast<std::size_t>(n);
        const bool fits = length <= out->size();
        out->resize(length);
        if (fits) return true;  // else once more with room; it may have grown again by then
    }
    return false;
}

enum class Swap : std::uint8_t { Swapped, Conflict, Missing, Failed };

Swap compare_set(const ft_store& store, const std::string& key, const Bytes& expected, const Bytes& desired, Bytes* out) {
    const auto u8 = [](const Bytes& b) { return reinterpret_cast<const std::uint8_t*>(b.data()); };
    out->resize(std::max(kFirstCapacity, std::max(expected.size(), desired.size())));
    const auto n = store.compare_set(store.context, key.c_str(), u8(expected), expected.size(), u8(desired), desired.size(),
                                     reinterpret_cast<std::uint8_t*>(out->data()), out->size());
    if (n < 0 || static_cast<std::uint64_t>(n) > kMaxValue) return Swap::Failed;
    if (static_cast<std::size_t>(n) > out->size()) {
        // Longer than both: somebody else's. It has to be fetched to be reported.
        return get(store, key, out) ? (*out == desired ? Swap::Swapped : Swap::Conflict) : Swap::Failed;
    }
    out->resize(static_cast<std::size_t>(n));
    if (*out == desired) return Swap::Swapped;
    // torch's TCPStore answers a compare_set on a missing key with what the caller expected; others with nothing.
    if (*out == expected || (out->empty() && !expected.empty())) return Swap::Missing;
    return Swap::Conflict;
}

Status store_failed(const char* what) {
    return Status::error(Code::NoAuthority, std::string("the job's store failed while ") + what +
                                                ": is the process that hosts it (ftrun's agent) still running?");
}

}  // namespace

// What the thread works on. It outlives the authority when a call hangs in the store.
struct StoreAuthority::Shared {
    struct Job {
        std::string key;
        bool swap = false;
        Bytes expected, desired;
        std::uint64_t request = 0;
    };

    Shared(const ft_store& store_, std::string job_, IoLoop& loop_, Deliver deliver_)
        : store(store_), job(std::move(job_)), loop(loop_), deliver(std::move(deliver_)) {}

    CellReply perform(const Job& work) {
        CellReply reply;
        reply.request = work.request;
        if (!work.swap) {
            reply.result = read(work.key, &reply.value) ? CellResult::Value : CellResult::Lost;
        } else {
            switch (compare_set(store, work.key, work.expected, work.desired, &reply.value)) {
                case Swap::Swapped: reply.result = CellResult::Swapped; break;
                case Swap::Conflict: reply.result = CellResult::Conflict; break;
                case Swap::Missing: reply.result = CellResult::Unknown; break;
                case Swap::Failed:
                    // It may have taken effect. One read tells whether there still is a store to ask.
                    reply.result = read(work.key, &reply.value) ? CellResult::Unknown : CellResult::Lost;
                    break;
            }
        }
        // After the operation: a store that was replaced before or during it shows here (M3).
        Bytes boot;
        if (reply.result != CellResult::Lost && (!read(boot_key(job), &boot) || !parse_boot(boot, &reply.boot))) {
            reply.result = CellResult::Lost;
        }
        if (reply.result == CellResult::Lost || reply.result == CellResult::Unknown || reply.result == CellResult::Swapped) {
            reply.value.clear();
        }
        return reply;
    }

    bool read(const std::string& key, Bytes* out) { return get(store, key, out) || get(store, key, out); }

    static void run(const std::shared_ptr<Shared>& self) {
        std::unique_lock lock(self->mutex);
        for (;;) {
            self->wake.wait(lock, [&] { return self->stopped || !self->queue.empty(); });
            if (self->stopped) break;
            const Job work = std::move(self->queue.front());
            self->queue.pop_front();
            lock.unlock();
            auto reply = self->perform(work);
            lock.lock();
            if (self->stopped) break;
            // Under the mutex, so that stop() knows that nothing reaches the loop after it.
            self->loop.post([self, reply = std::move(reply)]() mutable {
                // The loop's thread holds the engine: stop() cannot be between this look and the delivery, because
                // whoever stopped this object and then frees the node does so with the engine locked.
                {
                    std::lock_guard guard(self->mutex);
                    if (self->stopped) return;
                }
                self->deliver(std::move(reply));
            });
        }
        self->ended = true;
        self->end.notify_all();
    }

    void enqueue(Job work) {
        std::lock_guard guard(mutex);
        if (stopped) return;
        queue.push_back(std::move(work));
        wake.notify_one();
    }

    const ft_store store;
    const std::string job;
    IoLoop& loop;
    const Deliver deliver;
    std::mutex mutex;
    std::condition_variable wake, end;
    std::deque<Job> queue;
    bool stopped = false, ended = false;
};

StoreAuthority::StoreAuthority(const ft_store& store, std::string job, IoLoop& loop, Deliver deliver)
    : shared_(std::make_shared<Shared>(store, std::move(job), loop, std::move(deliver))) {
    FT_CHECK(store.get != nullptr && store.compare_set != nullptr, "a store without its functions");
}

StoreAuthority::~StoreAuthority() {
    if (forked_) {
        // The mutex may have been held by a thread that does not exist here: the object is left as it is.
        new std::shared_ptr<Shared>(std::move(shared_));
        return;
    }
    stop(0);
}

Status StoreAuthority::start() {
    std::thread thread;
    if (auto s = start_thread(&thread, "ftcomm-store", [self = shared_] { Shared::run(self); }); !s) return s;
    thread.detach();  // the end is waited for by condition, because a join could not be given up
    started_ = true;
    return {};
}

void StoreAuthority::read(const std::string& key, std::uint64_t request) { shared_->enqueue({key, false, {}, {}, request}); }

void StoreAuthority::compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) {
    shared_->enqueue({key, true, expected, desired, request});
}

bool StoreAuthority::stop(Time bound) {
    if (forked_) return true;
    std::unique_lock lock(shared_->mutex);
    shared_->stopped = true;
    shared_->queue.clear();
    shared_->wake.notify_all();
    if (!started_) return true;
    return shared_->end.wait_for(lock, std::chrono::nanoseconds(bound), [&] { return shared_->ended; });
}

void StoreAuthority::close_in_child() { forked_ = true; }

Status StoreAuthority::write_boot(const ft_store& store, const std::string& job, std::uint64_t boot) {
    Bytes value;
    switch (compare_set(store, boot_key(job), {}, bytes_of(boot_text(boot)), &value)) {
        case Swap::Swapped: return {};
        case Swap::Conflict:
            return Status::error(Code::Invalid, "the job name \"" + job +
                                                    "\" was used before in this store: start with another name "
                                                    "(FTCOMM_JOB) or an empty store");
        case Swap::Missing:
        case Swap::Failed: break;
    }
    // Unknown: it may have been written.
    return check_boot(store, job, boot);
}

Status StoreAuthority::check_boot(const ft_store& store, const std::string& job, std::uint64_t boot) {
    std::uint64_t there = 0;
    if (auto s = read_boot(store, job, &there); !s.ok()) return s;
    if (there == boot) return {};
    return Status::error(Code::NoAuthority,
                         "the store belongs to another start of job \"" + job + "\": do all ranks use the same store?");
}

Status StoreAuthority::read_boot(const ft_store& store, const std::string& job, std::uint64_t* boot) {
    Bytes value;
    if (!get(store, boot_key(job), &value) && !get(store, boot_key(job), &value)) return store_failed("reading the boot nonce");
    if (parse_boot(value, boot)) return {};
    return Status::error(Code::NoAuthority, "the store does not know job \"" + job +
                                                "\": it was restarted empty, or this rank uses another store than the rest");
}

}  // namespace ftcomm
