// Host memory of an operation: the tensors themselves on the CPU, pinned copies otherwise, flat buffers for lists.
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "errors.h"
#include "operation.h"

namespace ftcomm_torch {
namespace {

std::int64_t total(const std::vector<at::Tensor>& tensors) {
    std::int64_t count = 0;
    for (const auto& tensor : tensors) count += tensor.numel();
    return count;
}

// One block that the tensors tile in order (views of one buffer, as FSDP and many scripts pass), or an undefined tensor.
at::Tensor tiled(const std::vector<at::Tensor>& tensors) {
    const auto& first = tensors[0];
    std::int64_t offset = first.storage_offset();
    for (const auto& tensor : tensors) {
        if (!tensor.storage().is_alias_of(first.storage()) || tensor.storage_offset() != offset) return {};
        offset += tensor.numel();
    }
    return at::empty({0}, first.options()).set_(first.storage(), first.storage_offset(), {total(tensors)}, {1});
}

}  // namespace

void Operation::use_device(const at::Tensor& tensor) {
    if (tensor.device().is_cpu()) {
        if (staging_) refuse(name + ": tensors are on different devices; move them to one device");
        return;
    }
    if (!staging_) {
        if (!kept_.empty()) refuse(name + ": tensors are on different devices; move them to one device");
        touched_device_ = true;
        if (Staging::captured(tensor.device())) {
            refuse(name + ": the current stream is being captured into a graph, and an operation can't be: call it outside");
        }
        staging_.emplace(tensor.device());
    }
    if (staging_->device() != tensor.device()) {
        refuse(c10::str(name, ": tensors are on different devices, ", staging_->device(), " and ", tensor.device(),
                        "; move them to one device"));
    }
}

// A graph's replays would not wait for anything, and an event from outside spoils it.
void Operation::refuse_in_capture() const {
    if (staging_ && Staging::captured(staging_->device()))
        refuse(name + ": the current stream is being captured into a graph: wait for the operation before or after that");
}

void Operation::join_stream() {
    if (!staging_ || !done()) return;
    staging_->join();
    for (const auto& tensor : made_) staging_->lend_memory(tensor);
}

void Operation::prepared() {
    if (staging_) staging_->close_inputs();
}

at::Tensor Operation::in(const at::Tensor& tensor) {
    use_device(tensor);
    kept_.push_back(tensor);
    if (!staging_) return tensor;
    at::Tensor host = Staging::host_like(tensor);
    kept_.push_back(host);
    staging_->fill(host, tensor);
    return host;
}

at::Tensor Operation::out(const at::Tensor& tensor, bool sparse) {
    use_device(tensor);
    kept_.push_back(tensor);
    if (!staging_) return tensor;
    at::Tensor host = Staging::host_like(tensor);
    if (sparse) host.zero_();
    kept_.push_back(host);
    staging_->guard_memory(tensor);
    at_end([host, tensor](Operation&) { tensor.copy_(host, /*non_blocking=*/true); });
    return host;
}

at::Tensor Operation::inout(const at::Tensor& tensor) {
    use_device(tensor);
    kept_.push_back(tensor);
    if (!staging_) return tensor;
    at::Tensor host = in(tensor);
    at_end([host, tensor](Operation&) { tensor.copy_(host, /*non_blocking=*/true); });
    return host;
}

at::Tensor Operation::in_list(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
        use_device(tensor);
        kept_.push_back(tensor);
    }
    if (!staging_) {
        if (at::Tensor block = tiled(tensors); block.defined()) return block;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor flat =
        staging_ ? Staging::host_empty(total(tensors), tensors[0]) : at::empty({total(tensors)}, tensors[0].options());
    kept_.push_back(flat);
    std::int64_t at = 0;
    for (const auto& tensor : tensors) {
        const at::Tensor piece = flat.narrow(0, at, tensor.numel()).view(tensor.sizes());
        at += tensor.numel();
        if (staging_) {
            staging_->fill(piece, tensor);
        } else {
            piece.copy_(tensor);
        }
    }
    return flat;
}

at::Tensor Operation::out_list(const std::vector<at::Tensor>& tensors, bool sparse) {
    for (const auto& tensor : tensors) {
        use_device(tensor);
        kept_.push_back(tensor);
        if (staging_) staging_->guard_memory(tensor);
    }
    if (!staging_) {
        if (at::Tensor block = tiled(tensors); block.defined()) return block;
    }
    at::Tensor flat =
        staging_ ? Staging::host_empty(total(tensors), tensors[0]) : at::empty({total(tensors)}, tensors[0].options());
    kept_.push_back(flat);
    if (sparse) flat.zero_();
    at_end([flat, tensors](Operation&) {
        std::int64_t at = 0;
        for (const auto& tensor : tensors) {
            tensor.copy_(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()), true);
            at += tensor.numel();
        }
    });
    return flat;
}

}  // namespace ftcomm_torch
