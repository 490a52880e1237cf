#include "tensors.h"

#include <algorithm>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "errors.h"
#include "ftcomm/ftcomm.h"

namespace ftcomm_torch {
namespace {

constexpr std::int32_t kBytes = 10;  // uint8

const char* op_name(std::int32_t op) {
    static const char* kNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
    return op >= 0 && op < 9 ? kNames[op] : "unknown";
}

}  // namespace

std::int32_t known_type(at::ScalarType type) {
    switch (type) {
        case at::kDouble: return 0;
        case at::kFloat: return 1;
        case at::kHalf: return 2;
        case at::kBFloat16: return 3;
        case at::kFloat8_e4m3fn: return 4;
        case at::kFloat8_e5m2: return 5;
        case at::kChar: return 6;
        case at::kShort: return 7;
        case at::kInt: return 8;
        case at::kLong: return 9;
        case at::kByte: return 10;
        case at::kUInt16: return 11;
        case at::kUInt32: return 12;
        case at::kUInt64: return 13;
        case at::kBool: return 14;
        case at::kComplexFloat: return 15;
        case at::kComplexDouble: return 16;
        default: return -1;
    }
}

Element reducible(const at::Tensor& tensor, std::int32_t op) {
    const std::int32_t dtype = known_type(tensor.scalar_type());
    if (dtype < 0 || ft_reduce_supported(dtype, op) == 0) {
        refuse(c10::str("tensors of type ", tensor.scalar_type(), " cannot be reduced with ", op_name(op),
                        ". Convert them, or see the table of operations and types in the documentation."),
               FT_UNSUPPORTED);
    }
    return {dtype, 1};
}

Element movable(const at::Tensor& tensor) {
    const std::int32_t dtype = known_type(tensor.scalar_type());
    if (dtype < 0) return {kBytes, static_cast<std::uint64_t>(tensor.element_size())};
    return {dtype, 1};
}

Reduction reduction(const c10d::ReduceOp& op) {
    if (op.op_ != c10d::ReduceOp::PREMUL_SUM) {
        if (op.op_ >= c10d::ReduceOp::UNUSED) refuse("unknown reduction operator");
        return {static_cast<std::int32_t>(op.op_), 1.0};
    }
    // The name that torch 2.11 has too.
    const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    if (supplement == nullptr) refuse("PREMUL_SUM without a factor: make it with torch.distributed._make_nccl_premul_sum");
    const double factor =
        supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
    return {static_cast<std::int32_t>(op.op_), factor};
}

void check_tensor(const at::Tensor& tensor, const char* what) {
    if (!tensor.defined()) refuse(c10::str(what, ": an undefined tensor was given"));
    if (tensor.layout() != at::kStrided) {
        refuse(c10::str(what, ": a tensor with layout ", tensor.layout(), " was given; call .to_dense() first (only ",
                        "all_reduce with sum takes sparse tensors)"));
    }
    if (tensor.is_quantized()) refuse(c10::str(what, ": a quantized tensor was given; send its int_repr() instead"));
    const auto device = tensor.device().type();
    if (device != at::kCPU && (device == at::kMeta || !c10::impl::hasDeviceGuardImpl(device))) {
        refuse(c10::str(what, ": a tensor on device ", tensor.device(), " was given; move it to the CPU or an accelerator"));
    }
    if (!tensor.is_contiguous()) {
        refuse(c10::str(what, ": a non-contiguous tensor was given (sizes ", tensor.sizes(), ", strides ", tensor.strides(),
                        "); call .contiguous() first, and copy the result back where the operation writes to it"));
    }
    if (tensor.is_conj() || tensor.is_neg()) {
        refuse(c10::str(what, ": a lazily conjugated or negated view was given; call .resolve_conj().resolve_neg() first"));
    }
}

void check_list(const std::vector<at::Tensor>& tensors, const char* what) {
    if (tensors.empty()) refuse(c10::str(what, ": an empty list of tensors was given"));
    for (const auto& tensor : tensors) {
        check_tensor(tensor, what);
        check_same_kind(tensors[0], tensor, what);
    }
}

void check_same_kind(const at::Tensor& a, const at::Tensor& b, const char* what) {
    if (a.device() != b.device()) {
        refuse(
            c10::str(what, ": tensors are on different devices, ", a.device(), " and ", b.device(), "; move them to one device"));
    }
    if (a.scalar_type() != b.scalar_type()) {
        refuse(c10::str(what, ": tensors have different types, ", a.scalar_type(), " and ", b.scalar_type(),
                        "; convert them to one type"));
    }
}

bool any_on_a_device(const std::vector<at::Tensor>& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.defined() && !t.device().is_cpu(); });
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) {
    if (tensors.size() != 1) refuse(c10::str(what, ": takes one tensor, ", tensors.size(), " were given"));
    check_tensor(tensors[0], what);
    return tensors[0];
}

double seconds(std::chrono::milliseconds timeout) {
    return timeout.count() <= 0 ? 0.0 : static_cast<double>(timeout.count()) / 1000.0;
}

}  // namespace ftcomm_torch
