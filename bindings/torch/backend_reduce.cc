// Operations that compute.
#include "backend.h"

namespace ftcomm_torch {
namespace {

void add_all_reduce(Operation& o, Call call, const at::Tensor& tensor, const Reduction& reduction) {
    call.op.dtype = reducible(tensor, reduction.op).dtype;
    call.op.op = reduction.op;
    call.op.factor = reduction.factor;
    call.op.count = static_cast<std::uint64_t>(tensor.numel());
    call.op.recv = o.inout(tensor).data_ptr();
    call.op.send = call.op.recv;
    o.calls.push_back(std::move(call));
}

void add_reduce(Operation& o, Call call, const at::Tensor& input, const at::Tensor* output, const Reduction& reduction,
                int root) {
    call.op.dtype = reducible(input, reduction.op).dtype;
    call.op.op = reduction.op;
    call.op.factor = reduction.factor;
    call.op.root = root;
    call.op.count = static_cast<std::uint64_t>(input.numel());
    if (output != nullptr && output->is_same(input)) {
        call.op.recv = o.inout(input).data_ptr();
        call.op.send = call.op.recv;
    } else {
        call.op.send = o.in(input).data_ptr();
        if (output != nullptr) call.op.recv = o.out(*output).data_ptr();
    }
    o.calls.push_back(std::move(call));
}

bool same_sizes(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
        if (tensor.numel() != tensors[0].numel()) return false;
    }
    return true;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
    const auto begin_a = reinterpret_cast<std::uintptr_t>(a.data_ptr()), begin_b = reinterpret_cast<std::uintptr_t>(b.data_ptr());
    return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

}  // namespace

FtBackend::WorkPtr FtBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    if (tensors.size() == 1 && tensors[0].defined() && tensors[0].layout() == at::kSparse) {
        return allreduce_sparse(tensors, opts);
    }
    return start(c10d::OpType::ALLREDUCE, "ftcomm:all_reduce", tensors, [&](Operation& o) {
        const at::Tensor& tensor = only(tensors, "all_reduce");
        add_all_reduce(o, collective(FT_ALL_REDUCE, opts), tensor, reduction(opts.reduceOp));
        o.result = tensors;
    });
}

FtBackend::WorkPtr FtBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
    return start(c10d::OpType::ALLREDUCE_COALESCED, "ftcomm:all_reduce_coalesced", tensors, [&](Operation& o) {
        const Reduction op = reduction(opts.reduceOp);
        for (const auto& tensor : tensors) {
            check_tensor(tensor, "all_reduce_coalesced");
            add_all_reduce(o, collective(FT_ALL_REDUCE, opts), tensor, op);
        }
        o.result = tensors;
    });
}

FtBackend::WorkPtr FtBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
    return start(c10d::OpType::REDUCE, "ftcomm:reduce", tensors, [&](Operation& o) {
        const at::Tensor& tensor = only(tensors, "reduce");
        const bool root = opts.rootRank == getRank();
        add_reduce(o, collective(FT_REDUCE, opts), tensor, root ? &tensor : nullptr, reduction(opts.reduceOp),
                   static_cast<int>(opts.rootRank));
        o.result = tensors;
    });
}

void FtBackend::add_reduce_scatter(Operation& o, const at::Tensor& output, const at::Tensor& input,
                                   const c10d::ReduceScatterOptions& opts) {
    check_tensor(output, "reduce_scatter");
    check_tensor(input, "reduce_scatter");
    check_same_kind(output, input, "reduce_scatter");
    if (input.numel() != output.numel() * getSize()) {
        refuse(c10::str("reduce_scatter: the input has ", input.numel(), " elements; it must have ", getSize(), " x ",
                        output.numel(), ", the number of ranks times the output's"));
    }
    const Reduction op = reduction(opts.reduceOp);
    Call call = collective(FT_REDUCE_SCATTER, opts);
    call.op.dtype = reducible(input, op.op).dtype;
    call.op.op = op.op;
    call.op.factor = op.factor;
    call.op.count = static_cast<std::uint64_t>(output.numel());
    // FSDP writes the output into the input: the library wants its input whole until the end.
    const bool copy = input.device().is_cpu() && overlap(input, output);
    call.op.send = o.in(copy ? input.clone() : input).data_ptr();
    call.op.recv = o.out(output).data_ptr();
    o.calls.push_back(std::move(call));
}

FtBackend::WorkPtr FtBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                             const c10d::ReduceScatterOptions& opts) {
    return start(c10d::OpType::REDUCE_SCATTER, "ftcomm:reduce_scatter", outputs, [&](Operation& o) {
        const at::Tensor& output = only(outputs, "reduce_scatter");
        if (inputs.size() != 1 || static_cast<int>(inputs[0].size()) != getSize()) {
            refuse(c10::str("reduce_scatter: needs one input tensor for each of the ", getSize(), " ranks"));
        }
        const Tensors& list = inputs[0];
        check_list(list, "reduce_scatter");
        check_same_kind(output, list[0], "reduce_scatter");
        if (list[static_cast<std::size_t>(getRank())].numel() != output.numel()) {
            refuse(c10::str("reduce_scatter: input ", getRank(), " has ", list[static_cast<std::size_t>(getRank())].numel(),
                            " elements, the output ", output.numel(), "; they must be equal"));
        }
        const Reduction op = reduction(opts.reduceOp);
        if (same_sizes(list)) {
            Call call = collective(FT_REDUCE_SCATTER, opts);
            call.op.dtype = reducible(output, op.op).dtype;
            call.op.op = op.op;
            call.op.factor = op.factor;
            call.op.count = static_cast<std::uint64_t>(output.numel());
            const at::Tensor flat = o.in_list(list);
            call.op.send = (output.device().is_cpu() && overlap(flat, output) ? o.in(flat.clone()) : flat).data_ptr();
            call.op.recv = o.out(output).data_ptr();
            o.calls.push_back(std::move(call));
        } else {
            // Uneven: a reduce to each rank in turn.
            for (int root = 0; root < getSize(); ++root) {
                add_reduce(o, collective(FT_REDUCE, opts), list[static_cast<std::size_t>(root)],
                           root == getRank() ? &output : nullptr, op, root);
            }
        }
        o.result = outputs;
    });
}

FtBackend::WorkPtr FtBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& opts) {
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, "ftcomm:reduce_scatter_tensor", {input}, [&](Operation& o) {
        add_reduce_scatter(o, output, input, opts);
        o.result = {output};
    });
}

FtBackend::WorkPtr FtBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::ReduceScatterOptions& opts) {
    return start(c10d::OpType::COALESCED, "ftcomm:reduce_scatter_tensor_coalesced", inputs, [&](Operation& o) {
        if (outputs.size() != inputs.size()) {
            refuse(c10::str("reduce_scatter_tensor_coalesced: ", outputs.size(), " outputs for ", inputs.size(), " inputs"));
        }
        for (std::size_t i = 0; i < inputs.size(); ++i) add_reduce_scatter(o, outputs[i], inputs[i], opts);
        o.result = outputs;
    });
}

}  // namespace ftcomm_torch
