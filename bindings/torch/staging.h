// Host memory for tensors on an accelerator: pinned buffers, filled and emptied on a side stream. Written with torch's
// device-generic streams and events, so it builds without CUDA and serves whatever device torch has.
#pragma once

#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ftcomm_torch {

class Staging {
public:
    // The side stream goes on after all that the caller's current stream holds now.
    explicit Staging(at::Device device);

    at::Device device() const { return device_; }
    // The caller's current stream is being recorded into a graph, whose replays would not come to the library. Asked before the
    // operation gives the device anything: an event recorded in a capture can't be waited for, and the ranks would be out of step.
    static bool captured(at::Device device);
    // A host copy of the tensor, filled when wait_ready() has returned.
    void fill(const at::Tensor& host, const at::Tensor& tensor);
    // All fills were requested.
    void close_inputs();
    // Blocks the calling thread (a lane's, never the user's) until the fills are done. Not by looking again and again: a query from
    // another thread would spoil a graph that the user's thread captures.
    void wait_ready();
    // The side stream goes on after all that the caller's current stream holds now, again.
    void follow();
    // Runs fn, which copies host to device, with the side stream current; then records the end. `used`: what it copies to. By
    // now the device has come to the operation, so that any stream will do.
    void finish(const std::function<void()>& fn, const std::vector<at::Tensor>& used);
    void on_side_stream(const std::function<void()>& fn) const;
    // The caller's current stream goes on after the end, or after the fills.
    void join() const { block_caller(end_); }
    void join_inputs() const { block_caller(ready_); }

    static at::Tensor host_like(const at::Tensor& tensor);
    static at::Tensor host_empty(std::int64_t count, const at::Tensor& like);
    // The allocator must not hand the memory out again before the side stream is done with it.
    void guard_memory(const at::Tensor& tensor) const;
    // The other way round: memory allocated on the side stream, which the caller's current stream goes on with.
    void lend_memory(const at::Tensor& tensor) const;

private:
    void block_caller(const c10::Event& event) const;

    at::Device device_;
    c10::impl::VirtualGuardImpl impl_;
    c10::Stream side_;
    c10::Event ready_;
    c10::Event end_;
};

}  // namespace ftcomm_torch
