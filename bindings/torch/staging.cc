#include "staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/pybind11.h>

namespace ftcomm_torch {
namespace {

// Before torch 2.13 only the device's Python module can say so.
template <class Stream>
bool is_capturing(const Stream& stream) {
    if constexpr (requires { stream.is_capturing(); }) {
        return stream.is_capturing();
    } else {
        const c10::StreamGuard guard(stream);  // and its device
        const pybind11::gil_scoped_acquire gil;
        const auto type = c10::DeviceTypeName(stream.device_type(), /*lower_case=*/true);
        const auto module = pybind11::module_::import("torch").attr("get_device_module")(type);
        const char* const name = "is_current_stream_capturing";
        return pybind11::hasattr(module, name) && module.attr(name)().template cast<bool>();
    }
}

// From the pool that torch.cuda.Stream() and CUDA graphs do not take theirs from. A program can have one of these all the same, and
// capture on it: what is given to it then goes into the graph, and is not done now.
c10::Stream side_stream(const c10::impl::VirtualGuardImpl& impl, at::Device device) {
    constexpr int kAsManyAsThereAre = 32;
    auto stream = impl.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    for (int i = 1; i < kAsManyAsThereAre && is_capturing(stream); ++i) stream = impl.getStreamFromGlobalPool(device, true);
    return stream;
}

}  // namespace

bool Staging::captured(at::Device device) { return is_capturing(c10::impl::VirtualGuardImpl(device.type()).getStream(device)); }

Staging::Staging(at::Device device)
    : device_(device), impl_(device.type()), side_(side_stream(impl_, device)), ready_(device.type()), end_(device.type()) {
    follow();
}

void Staging::follow() {
    const c10::DeviceGuard guard(device_);
    c10::Event start(device_.type());
    start.record(impl_.getStream(device_));
    start.block(side_);
}

void Staging::on_side_stream(const std::function<void()>& fn) const {
    c10::StreamGuard guard(side_);
    fn();
}

void Staging::fill(const at::Tensor& host, const at::Tensor& tensor) {
    guard_memory(tensor);
    at::AutoDispatchBelowADInplaceOrView below;  // no operation of the user's graph
    on_side_stream([&] { host.copy_(tensor, /*non_blocking=*/true); });
}

void Staging::close_inputs() { ready_.record(side_); }

void Staging::wait_ready() {
    c10::DeviceGuard guard(device_);
    ready_.synchronize();
}

void Staging::finish(const std::function<void()>& fn, const std::vector<at::Tensor>& used) {
    if (is_capturing(side_)) {
        side_ = side_stream(impl_, device_);
        for (const auto& tensor : used)
            if (tensor.device() == device_) guard_memory(tensor);
    }
    on_side_stream([&] {
        fn();
        end_.record(side_);
    });
}

void Staging::block_caller(const c10::Event& event) const {
    const c10::DeviceGuard guard(device_);
    event.block(impl_.getStream(device_));
}

at::Tensor Staging::host_like(const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
}

at::Tensor Staging::host_empty(std::int64_t count, const at::Tensor& like) {
    return at::empty({count}, like.options().device(at::kCPU).pinned_memory(true));
}

void Staging::guard_memory(const at::Tensor& tensor) const {
    if (tensor.numel() > 0) tensor.record_stream(side_);
}

void Staging::lend_memory(const at::Tensor& tensor) const {
    if (tensor.numel() > 0) tensor.record_stream(impl_.getStream(device_));
}

}  // namespace ftcomm_torch
