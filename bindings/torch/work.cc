#include "work.h"

#include <optional>
#include <utility>

#include <ATen/core/jit_type.h>
#include <pybind11/pybind11.h>

#include "errors.h"
#include "tensors.h"

namespace ftcomm_torch {
namespace {

// Waiting needs no GIL; some of torch's own C++ code waits with it.
class WithoutGil {
public:
    WithoutGil() {
        if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) release_.emplace();
    }

private:
    std::optional<pybind11::gil_scoped_release> release_;
};

}  // namespace

FtWork::FtWork(std::shared_ptr<Operation> operation, int rank, c10d::OpType type, const char* title,
               const std::optional<std::vector<at::Tensor>>& inputs)
    : c10d::Work(rank, type, title, inputs), operation_(std::move(operation)) {
    operation_->on_end = std::exchange(recordFunctionEndCallback_, nullptr);
}

FtWork::~FtWork() {
    // Nobody will wait any more, but the memory is in use until the end.
    if (!operation_->done()) operation_->subscribe();
}

// Who polls may use the result on its current stream then, without a word more.
bool FtWork::isCompleted() {
    WithoutGil without;
    if (!operation_->test()) return false;
    operation_->join_stream();
    return true;
}

bool FtWork::isSuccess() const { return operation_->done() && !operation_->error(); }
std::exception_ptr FtWork::exception() const { return operation_->error(); }
int FtWork::sourceRank() const { return operation_->source(); }
std::vector<at::Tensor> FtWork::result() { return operation_->result; }
void FtWork::synchronize() { operation_->synchronize(); }

bool FtWork::wait(std::chrono::milliseconds timeout) {
    WithoutGil without;
    operation_->wait(seconds(timeout));
    return true;
}

void FtWork::settle() {
    WithoutGil without;
    try {
        operation_->wait(0);
    } catch (const FtError&) { return; }
}

void FtWork::abort() {
    WithoutGil without;
    operation_->cancel(FT_CANCELLED);
}

c10::intrusive_ptr<c10::ivalue::Future> FtWork::getFuture() { return operation_->future(); }

c10::intrusive_ptr<c10::ivalue::Future> FtWork::getFutureResult() {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    operation_->future()->addCallback([future, operation = operation_](c10::ivalue::Future&) {
        const int code = code_of(operation->error());
        const auto result = code == FT_OK        ? c10d::WorkResult::SUCCESS
                            : code == FT_TIMEOUT ? c10d::WorkResult::TIMEOUT
                                                 : c10d::WorkResult::COMM_ERROR;
        future->markCompleted(c10::IValue(static_cast<std::int64_t>(result)));
    });
    return future;
}

uint64_t FtWork::getSequencenumber() const { return operation_->sequence; }

FtGroupWork::FtGroupWork(std::vector<c10::intrusive_ptr<FtWork>> works, int rank)
    : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool FtGroupWork::isCompleted() {
    bool all = true;
    for (const auto& work : works_) all = work->isCompleted() && all;
    return all;
}

bool FtGroupWork::isSuccess() const {
    for (const auto& work : works_) {
        if (!work->isSuccess()) return false;
    }
    return true;
}

std::exception_ptr FtGroupWork::exception() const {
    for (const auto& work : works_) {
        if (auto error = work->exception()) return error;
    }
    return nullptr;
}

std::vector<at::Tensor> FtGroupWork::result() {
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
        const auto part = work->result();
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

void FtGroupWork::synchronize() {
    for (const auto& work : works_) work->synchronize();
}

bool FtGroupWork::wait(std::chrono::milliseconds timeout) {
    // All of them, also after an error: the caller may reuse every buffer afterwards.
    std::exception_ptr error;
    for (const auto& work : works_) {
        try {
            work->wait(timeout);
        } catch (...) {
            if (!error) error = std::current_exception();
        }
    }
    if (error) std::rethrow_exception(error);
    return true;
}

void FtGroupWork::abort() {
    for (const auto& work : works_) work->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> FtGroupWork::getFuture() {
    // Tensors on a device that the future does not know of would be refused by it.
    std::vector<c10::Device> devices;
    for (const auto& work : works_) {
        const auto& own = work->getFuture()->devices();
        devices.insert(devices.end(), own.begin(), own.end());
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    if (works_.empty()) {
        future->markCompleted(c10::IValue(std::vector<at::Tensor>{}));
        return future;
    }
    auto left = std::make_shared<std::atomic<std::size_t>>(works_.size());
    for (const auto& work : works_) {
        work->getFuture()->addCallback([future, left, self = c10::intrusive_ptr<FtGroupWork>::reclaim_copy(this)](auto&) {
            if (--*left > 0) return;
            if (auto error = self->exception()) {
                future->setError(error);
                return;
            }
            try {
                self->synchronize();  // this future's events stand for the copies of all, not of the last one alone
            } catch (const std::exception&) {
                future->setErrorIfNeeded(std::current_exception());
                return;
            }
            future->markCompleted(c10::IValue(self->result()));
        });
    }
    return future;
}

}  // namespace ftcomm_torch
