#include "operation.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Logging.h>

#include "errors.h"
#include "pieces.h"
#include "pool.h"

namespace ftcomm_torch {

int Call::post(ft_job* job, ft_comm comm, ft_request** out) {
    switch (kind) {
        case Kind::Send: return ft_send(job, comm, data, bytes, peer, tag, out);
        case Kind::Recv: return ft_recv(job, comm, data, bytes, peer, tag, out);
        case Kind::Collective: break;
    }
    const auto pointer = [](const std::vector<std::uint64_t>& v) { return v.empty() ? nullptr : v.data(); };
    op.send_counts = pointer(send_counts);
    op.send_offsets = pointer(send_offsets);
    op.recv_counts = pointer(recv_counts);
    op.recv_offsets = pointer(recv_offsets);
    return ft_collective(job, comm, &op, out);
}

Operation::~Operation() {
    for (ft_request* request : requests_) ft_request_free(request);
    if (!staging_) return;
    try {
        // The end of an event makes its device current, and then the one before: for a thread that has used none that would be the
        // first, with a context on it that nobody wants.
        const c10::DeviceGuard guard(staging_->device());
        staging_.reset();
    } catch (const std::exception&) { return; }  // of a device that has failed
}

void Operation::post(ft_job* job, ft_comm comm, bool by_caller) {
    std::vector<ft_request*> requests;
    requests.reserve(calls.size());
    std::exception_ptr error;
    for (Call& call : calls) {
        if (!by_caller || calls.size() > 1) call.op.waits = 0;  // the caller does not wait for this one next
        ft_request* request = nullptr;
        const int code = call.post(job, comm, &request);
        if (code != FT_OK || request == nullptr) {
            // The calls after it are not made: the other ranks learn of it by their mismatch or timeout.
            error = last_error(code);
            break;
        }
        requests.push_back(request);
    }
    bool callbacks = false;
    int cancelled = FT_OK;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        requests_ = std::move(requests);
        error_ = error;
        stage_ = Stage::Posted;
        callbacks = subscribed_;
        cancelled = cancelled_;
        if (callbacks) undone_ = requests_.size();
    }
    changed_.notify_all();
    // It was posted all the same: the ranks' operations stay in one order.
    if (cancelled != FT_OK) {
        for (ft_request* request : requests_) ft_request_fail(request, cancelled);
    }
    if (callbacks) register_callbacks();
}

void Operation::fail(std::exception_ptr error) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::move(error);
        stage_ = Stage::Posted;
    }
    changed_.notify_all();
    complete();
}

bool Operation::test() {
    refuse_in_capture();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stage_ == Stage::Done) return true;
        if (stage_ != Stage::Posted) return false;
    }
    for (ft_request* request : requests_) {
        std::int32_t done = 0;
        if (ft_request_test(request, &done) != FT_CLOSED && done == 0) return false;
    }
    complete();
    return true;
}

void Operation::wait(double timeout) {
    refuse_in_capture();
    wait_posted(timeout > 0 ? timeout : device_limit);
    for (ft_request* request : requests_) wait_request(request, timeout);
    complete();
    const std::exception_ptr error = this->error();
    if (error) std::rethrow_exception(error);
    join_stream();
}

// For the lane, which waits for the device: that may hang, behind a kernel whose peers are dead.
void Operation::wait_posted(double timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stage_ != Stage::Unposted) return;
    const auto waited = wait_in_pieces(changed_, lock, timeout, [this] { return stage_ != Stage::Unposted; });
    if (waited.ready) return;
    cancel(waited.interrupt ? FT_INTERRUPTED : FT_TIMEOUT);
    subscribe();
    if (staging_) staging_->join_inputs();  // what the caller does to its tensors now comes after the copies
    if (waited.interrupt) std::rethrow_exception(waited.interrupt);
    std::rethrow_exception(own_error(
        FT_TIMEOUT, c10::str("Timed out in ", name, ": after ", timeout,
                             " s this rank's device has not come to it. What was given to the device before it has not ended.")));
}

void Operation::wait_request(ft_request* request, double timeout) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    bool given_up = timeout <= 0;
    while (true) {
        const double left =
            given_up ? kPiece : std::max(0.0, timeout - std::chrono::duration<double>(Clock::now() - start).count());
        const int code = ft_request_wait(request, std::min(left, kPiece));
        std::int32_t done = 0;
        const bool maybe_pending = code == FT_INTERRUPTED || code == FT_TIMEOUT;
        if (maybe_pending) ft_request_test(request, &done);
        if (done != 0 || !maybe_pending) return;  // the operation's own result
        if (code == FT_TIMEOUT && !given_up && left <= kPiece) {
            // Not this rank's decision alone: the members vote, and the request is then done, one way or the other.
            ft_request_fail(request, FT_TIMEOUT);
            given_up = true;
            continue;
        }
        if (const std::exception_ptr interrupt = python_interrupt()) {
            cancel(FT_INTERRUPTED);
            subscribe();  // the buffers stay in use until the vote
            std::rethrow_exception(interrupt);
        }
    }
}

void Operation::cancel(int why) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stage_ == Stage::Unposted && cancelled_ == FT_OK) cancelled_ = why;  // for post()
        if (stage_ != Stage::Posted) return;
    }
    for (ft_request* request : requests_) ft_request_fail(request, why);
}

void Operation::complete() {
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (stage_ == Stage::Claimed) changed_.wait(lock, [this] { return stage_ == Stage::Done; });
        if (stage_ == Stage::Done) return;
        stage_ = Stage::Claimed;
    }
    std::exception_ptr error = error_;
    // Who gave up was told so, and has its tensors for other things since.
    if (staging_ && cancelled_ != FT_OK && !error) error = own_error(cancelled_, name + ": it was given up before it was posted");
    for (ft_request* request : requests_) {
        std::int32_t done = 0;
        const int code = ft_request_test(request, &done);  // FT_CLOSED: the job has ended before it
        if (code != FT_OK && !error) error = last_error(code);
    }
    if (!error) {
        try {
            // The copies are no operations of the user's graph (and may write to parameters).
            at::AutoDispatchBelowADInplaceOrView below;
            const auto run = [this] {
                for (const auto& fn : finishers_) fn(*this);
            };
            if (staging_) {
                staging_->finish(run, kept_);
            } else {
                run();
            }
        } catch (...) { error = std::current_exception(); }
    }
    if (error && on_error) on_error(code_of(error));
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = error;
        stage_ = Stage::Done;
        future = future_;
    }
    changed_.notify_all();
    if (on_end) std::exchange(on_end, nullptr)();
    finishers_.clear();
    kept_.clear();
    if (future) mark(future, error);
}

void Operation::mark(const c10::intrusive_ptr<c10::ivalue::Future>& future, const std::exception_ptr& error) {
    // Without any lock: callbacks are user code, which may wait for other operations.
    const auto run = [&] {
        try {
            if (error) {
                future->setError(error);
            } else {
                future->markCompleted(c10::IValue(result));
            }
        } catch (const std::exception& e) {
            LOG(WARNING) << "ftcomm: a callback of " << name << "'s future failed: " << e.what();
        }
    };
    try {
        if (staging_ && !error) {
            staging_->on_side_stream(run);
        } else {
            run();
        }
    } catch (const std::exception&) { future->setErrorIfNeeded(std::current_exception()); }  // a device that has failed
}

void Operation::subscribe() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (subscribed_ || stage_ == Stage::Done) return;
        subscribed_ = true;
        if (stage_ == Stage::Unposted) return;  // post() registers
        undone_ = requests_.size();
    }
    register_callbacks();
}

void Operation::register_callbacks() {
    if (requests_.empty()) {
        Pool::get().run([self = shared_from_this()] { self->complete(); });
        return;
    }
    for (ft_request* request : requests_) {
        ft_request_on_done(request, &Operation::request_done, new std::shared_ptr<Operation>(shared_from_this()));
    }
}

// On a library thread: only counts. The rest is not its work, and may take long.
void Operation::request_done(void* context) {
    std::unique_ptr<std::shared_ptr<Operation>> holder(static_cast<std::shared_ptr<Operation>*>(context));
    std::shared_ptr<Operation> self = std::move(*holder);
    {
        std::lock_guard<std::mutex> lock(self->mutex_);
        if (--self->undone_ > 0) return;
    }
    Pool::get().run([self = std::move(self)] { self->complete(); });
}

c10::intrusive_ptr<c10::ivalue::Future> Operation::future() {
    std::exception_ptr error;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (future_) return future_;
        std::vector<c10::Device> devices;
        if (staging_) devices.push_back(staging_->device());
        future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
        future = future_;
        if (stage_ != Stage::Done) {
            future = nullptr;
        } else {
            error = error_;
        }
    }
    if (future) {
        mark(future, error);
    } else {
        subscribe();
    }
    return future_;
}

bool Operation::done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stage_ == Stage::Done;
}

bool Operation::given_up() {
    std::lock_guard<std::mutex> lock(mutex_);
    return cancelled_ != FT_OK;
}

std::exception_ptr Operation::error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stage_ == Stage::Done ? error_ : nullptr;
}

}  // namespace ftcomm_torch
