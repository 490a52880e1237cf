// Starting operations in order: at once, or behind those whose data is still on its way from a device.
#include "backend.h"

#include <system_error>
#include <utility>

#include "../../native/src/runtime/signals.h"
#include "pieces.h"
#include "pool.h"

namespace ftcomm_torch {
namespace {

std::vector<at::Tensor> defined_ones(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> out;
    for (const auto& tensor : tensors) {
        if (tensor.defined()) out.push_back(tensor);
    }
    return out;
}

// A replacement whose log was lost with a host gets it back from the others first; else this is done at once.
int wait_for_log(ft_job* job, std::uint64_t comm) {
    ft_request* ready = nullptr;
    int code = ft_comm_ready(job, comm, &ready);
    if (code != FT_OK) return code;
    do code = ft_request_wait(ready, -1);
    while (code == FT_INTERRUPTED);
    ft_request_free(ready);
    return code;
}

}  // namespace

FtBackend::FtBackend(std::shared_ptr<JobRef> job, std::uint64_t id, std::string name, std::vector<std::int32_t> slots, int rank,
                     int policy, double timeout)
    : Backend(rank, static_cast<int>(slots.size())),
      job_(std::move(job)),
      id_(id),
      name_(std::move(name)),
      slots_(std::move(slots)),
      policy_(policy),
      timeout_(timeout) {
    const int code = job_->with([&](ft_job* j) {
        const auto size = static_cast<std::int32_t>(slots_.size());
        const int made = ft_comm_create(j, id_, name_.c_str(), slots_.data(), size, policy_, timeout);
        return made == FT_OK && policy_ == FT_REPLAY ? wait_for_log(j, id_) : made;
    });
    if (code != FT_OK) std::rethrow_exception(last_error(code));
    job_->attach();
}

FtBackend::~FtBackend() { close_comm(/*tell=*/false); }

Call FtBackend::collective(std::int32_t kind, std::chrono::milliseconds timeout) const {
    Call call;
    call.op.kind = kind;
    call.op.factor = 1.0;
    const double own = seconds(timeout);
    call.op.timeout = own > 0 ? own : timeout_.load();
    return call;
}

FtBackend::WorkPtr FtBackend::launch(std::shared_ptr<Operation> operation, c10d::OpType type, const char* title,
                                     const Tensors& inputs) {
    auto work = c10::make_intrusive<FtWork>(operation, getRank(), type, title,
                                            std::optional<std::vector<at::Tensor>>(defined_ones(inputs)));
    operation->on_error = [last_error = last_error_](int code) { *last_error = code; };
    if (operation->needs_lane() && !used_lane_.exchange(true) && on_lane_) on_lane_();
    if (!operation->done()) submit(operation);
    std::lock_guard<std::mutex> lock(order_);
    if (coalesced_) coalesced_->push_back(work);
    return work;
}

void FtBackend::post(Operation& operation, bool by_caller) {
    const int code = job_->with([&](ft_job* job) {
        if (closed_) return static_cast<int>(FT_CLOSED);
        operation.sequence = ft_comm_seq(job, id_);
        operation.post(job, id_, by_caller);
        return static_cast<int>(FT_OK);
    });
    if (code != FT_OK) {
        operation.fail(own_error(FT_CLOSED, operation.name + ": process group " + name_ +
                                                " is closed (destroy_process_group was called, or the job ended)"));
    }
}

void FtBackend::submit(const std::shared_ptr<Operation>& operation) {
    std::unique_lock<std::mutex> lock(order_);
    if (broken_) {
        operation->fail(broken_);
        return;
    }
    if (lane_stop_ ||
        (!operation->needs_lane() && !lane_busy_)) {  // stopped: nobody would serve it, and post() says that it is closed
        post(*operation, true);
        return;
    }
    if (!lane_thread_.joinable()) {
        try {
            const ftcomm::BlockSignals block;
            lane_thread_ = std::thread([this] { lane(); });
        } catch (const std::system_error& e) {
            lock.unlock();
            const auto error = own_error(FT_SYSTEM, operation->name + ": no thread to wait for the device: " + e.what());
            break_order(error);
            operation->fail(error);
            return;
        }
    }
    lane_queue_.push_back(operation);
    lane_busy_ = true;
    if (!lane_self_) lane_self_ = c10::intrusive_ptr<FtBackend>::reclaim_copy(this);
    lane_wake_.notify_one();
}

void FtBackend::break_order(const std::exception_ptr& why) {
    std::string text;
    try {
        std::rethrow_exception(why);
    } catch (const std::exception& e) { text = e.what(); }
    std::lock_guard<std::mutex> lock(order_);
    if (broken_) return;
    broken_ =
        own_error(FT_SYSTEM, "process group " + name_ + ": an operation failed on this rank before the others could meet it (" +
                                 text + "), and those after it would meet the wrong ones. End this process, or make a new group");
}

FtBackend::Drained FtBackend::drain() {
    std::unique_lock<std::mutex> lock(order_);
    if (!in_lane()) {  // else it is a callback of an operation that failed
        const auto waited = wait_in_pieces(lane_idle_, lock, timeout_.load(), [this] { return !lane_busy_; });
        if (waited.interrupt) std::rethrow_exception(waited.interrupt);
        if (!waited.ready) return Drained::TimedOut;
    }
    return broken_ ? Drained::Broken : Drained::Yes;
}

// Only the wait for the device is outside the lock; nobody else posts while the lane is busy. Who blocks on a device can't be told to
// stop: if it hangs (behind a kernel whose peers are dead), close_comm() leaves this thread where it is, and what it uses with it.
void FtBackend::lane() {
    std::exception_ptr error;  // of one that failed: those after it do, too
    std::unique_lock<std::mutex> lock(order_);
    while (true) {
        while (lane_queue_.empty()) {
            lane_busy_ = false;
            lane_idle_.notify_all();
            auto self = std::move(lane_self_);
            const bool stop = lane_stop_;
            if (!stop && !self) {
                lane_wake_.wait(lock);
                continue;
            }
            lock.unlock();
            // If it is the last reference its end joins this thread, or finds it left: so it is another one's to let go.
            if (self) Pool::get().run([self = std::move(self)] {});
            if (stop) return;
            lock.lock();
        }
        auto operation = lane_queue_.front();
        lane_queue_.pop_front();
        // Once it is closed nobody waits for a device any more: close_comm() joins this thread then, and post() says that it is closed.
        const bool waits = !error && !lane_stop_;
        lane_waits_ = waits;
        lock.unlock();
        try {
            if (waits) operation->await_inputs();
        } catch (const std::exception& e) {
            error = own_error(FT_SYSTEM, operation->name + ": copying from the device failed: " + e.what());
            break_order(error);
        }
        lock.lock();
        lane_waits_ = false;
        lock.unlock();
        if (error) {
            operation->fail(error);
        } else {
            post(*operation, false);
        }
        operation = nullptr;
        lock.lock();
    }
}

}  // namespace ftcomm_torch
