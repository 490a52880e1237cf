// What torch holds of an operation.
#pragma once

#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "operation.h"

namespace ftcomm_torch {

class FtWork final : public c10d::Work {
public:
    FtWork(std::shared_ptr<Operation> operation, int rank, c10d::OpType type, const char* title,
           const std::optional<std::vector<at::Tensor>>& inputs);
    ~FtWork() override;

    bool isCompleted() override;
    bool isSuccess() const override;
    std::exception_ptr exception() const override;
    int sourceRank() const override;
    std::vector<at::Tensor> result() override;
    void synchronize() override;
    bool wait(std::chrono::milliseconds timeout) override;
    void blockCurrentStream() override { wait(kNoTimeout); }  // torch's own would not wait for the copy back
    void abort() override;
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
    c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
    uint64_t getSequencenumber() const override;

    // Waits without throwing: the future then has the result or the error.
    void settle();
    Operation& operation() const { return *operation_; }

private:
    std::shared_ptr<Operation> operation_;
};

// What startCoalescing ... endCoalescing gathered; each operation is already under way.
class FtGroupWork final : public c10d::Work {
public:
    FtGroupWork(std::vector<c10::intrusive_ptr<FtWork>> works, int rank);

    bool isCompleted() override;
    bool isSuccess() const override;
    std::exception_ptr exception() const override;
    std::vector<at::Tensor> result() override;
    void synchronize() override;
    bool wait(std::chrono::milliseconds timeout) override;
    void blockCurrentStream() override { wait(kNoTimeout); }
    void abort() override;
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

private:
    std::vector<c10::intrusive_ptr<FtWork>> works_;
};

}  // namespace ftcomm_torch
