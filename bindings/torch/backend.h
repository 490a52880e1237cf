// ftcomm as a backend of torch.distributed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "errors.h"
#include "job_ref.h"
#include "tensors.h"
#include "work.h"

namespace ftcomm_torch {

struct FtOptions final : c10d::Backend::Options {
    explicit FtOptions(std::chrono::milliseconds timeout) : Options("ftcomm", timeout) {}
    std::string policy = "raise";
};

// One process group: a communicator of the process's job. No collective call throws: mistakes and failures alike are
// reported by the Work (a throw in the middle of DDP's backward would leave it unusable).
class FtBackend final : public c10d::Backend {
public:
    // slots: the job's rank of each member. id: equal on all members, different for every group of the job.
    FtBackend(std::shared_ptr<JobRef> job, std::uint64_t id, std::string name, std::vector<std::int32_t> slots, int rank,
              int policy, double timeout);
    ~FtBackend() override;

    using WorkPtr = c10::intrusive_ptr<c10d::Work>;
    using Tensors = std::vector<at::Tensor>;

    const std::string getBackendName() const override { return "ftcomm"; }
    bool supportsSplitting() const override { return true; }
    bool supportsCoalescing() const override { return false; }
    bool supportsShrinking() const override { return true; }

    // backend_reduce.cc
    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
    WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override;
    WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;
    // backend_sparse.cc
    WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
    // backend_data.cc
    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
    WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
    WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
    WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
    WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
    WorkPtr barrier(const c10d::BarrierOptions& opts) override;
    void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
    // backend_pairs.cc
    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
    WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                          std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
    WorkPtr send(Tensors& tensors, int dst, int tag) override;
    WorkPtr recv(Tensors& tensors, int src, int tag) override;
    WorkPtr recvAnysource(Tensors& tensors, int tag) override;
    // backend_control.cc
    void startCoalescing() override;
    WorkPtr endCoalescing() override;
    c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<std::int64_t>& exclude, int flags,
                                             const c10::intrusive_ptr<Options>& opts) override;
    c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<Options>& opts) override;
    c10::intrusive_ptr<Options> getBackendOptions() override;
    c10d::ErrorType getError() override;
    void setTimeout(std::chrono::milliseconds timeout) override;
    void setSequenceNumberForGroup() override {}
    std::uint64_t getSequenceNumberForGroup() override;
    void enableCollectivesTiming() override {}
    void abort() override;
    void shutdown() override;

    std::uint64_t id() const { return id_; }
    const std::vector<std::int32_t>& slots() const { return slots_; }
    const std::string& name() const { return name_; }
    double timeout() const { return timeout_.load(); }
    int policy() const { return policy_; }
    std::vector<std::uint8_t> alive();
    bool solo();
    bool closed() const { return closed_; }
    bool aborted() const { return aborted_; }
    const std::shared_ptr<JobRef>& job() const { return job_; }
    // Under `lossy`: a broadcast whose root is dead is made from the lowest living rank. Right where all ranks hold replicas: while
    // DistributedDataParallel hands its buffers and the order of its buckets round.
    void set_stand_in(bool on) { stand_in_ = on; }
    bool stand_in() const { return stand_in_; }

    // Until what waits for a device, and what was called after it, is posted: the direct API's calls come after it.
    enum class Drained { Yes, TimedOut, Broken };
    Drained drain();
    bool used_lane() const { return used_lane_; }
    // Called once, by whoever makes the first operation that waits for a device, before it.
    void set_on_lane(std::function<void()> fn) { on_lane_ = std::move(fn); }
    // For tests of the lane where there is no device: every operation from now on waits for this.
    void set_device(std::function<void()> fn) { device_ = std::move(fn); }

private:
    // Runs `prepare(operation)`, which fills in the calls, and starts the operation; what it throws fails the Work.
    template <class F>
    WorkPtr start(c10d::OpType type, const char* name, const Tensors& inputs, F&& prepare);
    WorkPtr launch(std::shared_ptr<Operation> operation, c10d::OpType type, const char* title, const Tensors& inputs);
    void submit(const std::shared_ptr<Operation>& operation);
    void post(Operation& operation, bool by_caller);
    void lane();
    bool in_lane() const { return std::this_thread::get_id() == lane_thread_.get_id(); }  // with order_
    void break_order(const std::exception_ptr& why);
    Call collective(std::int32_t kind, std::chrono::milliseconds timeout) const;
    template <class Options>
    Call collective(std::int32_t kind, const Options& opts) const {
        Call call = collective(kind, opts.timeout);
        if constexpr (requires { opts.asyncOp; }) call.op.waits = opts.asyncOp ? 0 : 1;
        return call;
    }
    void add_reduce_scatter(Operation& o, const at::Tensor& output, const at::Tensor& input,
                            const c10d::ReduceScatterOptions& opts);
    void add_all_gather(Operation& o, const at::Tensor& output, const at::Tensor& input, const c10d::AllgatherOptions& opts);
    void add_all_gather_list(Operation& o, const Tensors& outputs, const at::Tensor& input, const c10d::AllgatherOptions& opts);
    WorkPtr pairwise(bool sending, Tensors& tensors, int peer, int tag);
    c10::intrusive_ptr<FtBackend> derived(const std::vector<std::int32_t>& ranks, const std::string& label, double timeout);
    void close_comm(bool tell);

    const std::shared_ptr<JobRef> job_;
    const std::uint64_t id_;
    const std::string name_;
    const std::vector<std::int32_t> slots_;
    const int policy_;
    std::atomic<double> timeout_;
    const std::shared_ptr<std::atomic<int>> last_error_ = std::make_shared<std::atomic<int>>(0);
    std::atomic<bool> closed_{false}, aborted_{false}, stand_in_{false};
    int derived_ = 0;  // groups made of this one by shrink and split, in the same order on all members

    std::mutex order_;  // operations reach the library one at a time, in the order of the calls
    std::optional<std::vector<c10::intrusive_ptr<FtWork>>> coalesced_;
    std::deque<std::shared_ptr<Operation>> lane_queue_;  // operations that wait for a device, and those called after them
    bool lane_busy_ = false, lane_stop_ = false, lane_waits_ = false;
    c10::intrusive_ptr<FtBackend> lane_self_;  // while it is busy
    std::exception_ptr broken_;  // an operation failed here before it was posted: those after it would meet others of their peers
    std::condition_variable lane_wake_, lane_idle_;
    std::atomic<bool> used_lane_{false};
    std::function<void()> on_lane_, device_;
    std::thread lane_thread_;
};

template <class F>
FtBackend::WorkPtr FtBackend::start(c10d::OpType type, const char* name, const Tensors& inputs, F&& prepare) {
    auto operation = std::make_shared<Operation>(getSize());
    operation->name = name;
    operation->device_limit = timeout_.load();
    operation->device = device_;
    try {
        prepare(*operation);
        operation->prepared();
    } catch (const FtError&) {
        operation->calls.clear();
        operation->fail(std::current_exception());
    } catch (
        const pybind11::error_already_set& e) {  // KeyboardInterrupt, in an operation that waits for others; a device's error
        operation->calls.clear();
        if (operation->touched_device()) break_order(own_error(FT_SYSTEM, std::string(name) + ": " + e.what()));
        operation->fail(std::current_exception());
    } catch (const std::exception& e) {
        operation->calls.clear();
        if (operation->touched_device() || any_on_a_device(inputs))
            break_order(own_error(FT_SYSTEM, std::string(name) + ": " + e.what()));
        operation->fail(own_error(FT_INVALID, std::string(name) + ": " + e.what()));
    }
    return launch(std::move(operation), type, name, inputs);
}

}  // namespace ftcomm_torch
