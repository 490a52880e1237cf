// One operation of a process group from its preparation to its result; the Work that torch sees is a handle to it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include "ftcomm/ftcomm.h"
#include "staging.h"

namespace ftcomm_torch {

// One request to the library.
struct Call {
    enum class Kind { Collective, Send, Recv };
    Kind kind = Kind::Collective;
    ft_op op{};
    std::vector<std::uint64_t> send_counts{}, send_offsets{}, recv_counts{}, recv_offsets{};
    void* data = nullptr;  // Send, Recv
    std::uint64_t bytes = 0;
    int peer = -1;
    std::int64_t tag = 0;

    int post(ft_job* job, ft_comm comm, ft_request** out);
};

class Operation : public std::enable_shared_from_this<Operation> {
public:
    explicit Operation(int size) : size_(size) {}
    ~Operation();
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    // -- preparation, by the thread that calls the collective --
    std::string name;                   // "all_reduce", for messages
    std::vector<Call> calls;
    std::vector<at::Tensor> result;     // the value of the future
    std::function<void()> on_end;       // profiler
    std::function<void(int code)> on_error;
    std::function<void()> device;  // for tests: blocks until a device that is not there has come to it
    double device_limit = 0;  // seconds that wait() gives the device to come to it, where it has no limit of its own; 0: all

    // The host memory that the library may read (in), write (out) or both, for a tensor on any device.
    at::Tensor in(const at::Tensor& tensor);
    at::Tensor out(const at::Tensor& tensor, bool sparse = false);
    at::Tensor inout(const at::Tensor& tensor);
    // One flat buffer for a list. `sparse`, here and above: the library may leave parts untouched (of dead ranks): they are zero then.
    at::Tensor in_list(const std::vector<at::Tensor>& tensors);
    at::Tensor out_list(const std::vector<at::Tensor>& tensors, bool sparse);
    void at_end(std::function<void(Operation&)> fn) { finishers_.push_back(std::move(fn)); }
    void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }
    // What at_end() computes on this tensor's device is ordered with the caller's stream, as if the tensor were out().
    void on_device_of(const at::Tensor& tensor) { use_device(tensor); }
    // Of a result that at_end() has allocated, on the side stream: its memory is the caller's stream's, too.
    void made_at_end(const at::Tensor& tensor) { made_.push_back(tensor); }
    // What at_end() reads on the side stream besides.
    void used_at_end(const at::Tensor& tensor) {
        if (staging_) staging_->guard_memory(tensor);
    }
    // The caller's stream has been given more since the first tensor, for what is prepared from now on.
    void follow_caller() {
        if (staging_) staging_->follow();
    }
    bool needs_lane() const { return staging_.has_value() || device; }
    // Something was asked of a device, which may have failed here and nowhere else.
    bool touched_device() const { return touched_device_ || needs_lane(); }
    void prepared();  // after the last in()

    // -- posting: by the same thread, or by the group's lane --
    void post(ft_job* job, ft_comm comm, bool by_caller);
    void fail(std::exception_ptr error);  // instead of post()
    void await_inputs() {
        if (device) device();
        if (staging_) staging_->wait_ready();
    }

    // -- completion --
    bool test();
    // Throws the operation's error. 0: no limit of its own.
    void wait(double timeout);
    void cancel(int why);
    void subscribe();  // completes by itself from now on, also when nobody holds the Work any more
    c10::intrusive_ptr<c10::ivalue::Future> future();
    void join_stream();  // after test() or wait(), which refuse to in a capture
    void synchronize() {
        if (!done()) return;
        refuse_in_capture();
        join_stream();
    }
    bool done();
    bool given_up();  // by this rank, before it was posted: the others may make it all the same
    std::exception_ptr error();
    int source();              // receives: who sent, and how much
    std::uint64_t received();
    std::uint64_t sequence = 0;

    // -- after completion --
    std::vector<std::uint8_t> contributors();
    struct Piece {
        std::uint64_t offset, count;
        std::vector<std::uint8_t> flags;
    };
    std::vector<Piece> pieces();
    std::uint64_t epoch();

private:
    enum class Stage { Unposted, Posted, Claimed, Done };
    void complete();
    void wait_posted(double timeout);
    void wait_request(ft_request* request, double timeout);
    void register_callbacks();
    void mark(const c10::intrusive_ptr<c10::ivalue::Future>& future, const std::exception_ptr& error);
    void use_device(const at::Tensor& tensor);
    static void request_done(void* context);

    const int size_;
    void refuse_in_capture() const;

    std::vector<at::Tensor> kept_, made_;
    bool touched_device_ = false;
    std::optional<Staging> staging_;
    std::vector<std::function<void(Operation&)>> finishers_;

    std::mutex mutex_;
    std::condition_variable changed_;
    Stage stage_ = Stage::Unposted;
    bool subscribed_ = false;
    int cancelled_ = 0;  // before it was posted: why
    std::size_t undone_ = 0;  // requests whose callback has not run
    std::vector<ft_request*> requests_;  // fixed once posted; freed with the operation
    std::exception_ptr error_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ftcomm_torch
