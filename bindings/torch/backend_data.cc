// Operations that move data from or to everybody, and barriers.
#include <algorithm>

#include "backend.h"

namespace ftcomm_torch {
namespace {

std::vector<std::uint64_t> counts_of(const std::vector<at::Tensor>& tensors, std::uint64_t per_item) {
    std::vector<std::uint64_t> counts;
    for (const auto& tensor : tensors) counts.push_back(static_cast<std::uint64_t>(tensor.numel()) * per_item);
    return counts;
}

std::vector<std::uint64_t> offsets_of(const std::vector<std::uint64_t>& counts) {
    std::vector<std::uint64_t> offsets;
    std::uint64_t at = 0;
    for (const auto count : counts) {
        offsets.push_back(at);
        at += count;
    }
    return offsets;
}

void add_broadcast(Operation& o, Call call, const at::Tensor& tensor, int root) {
    const Element element = movable(tensor);
    call.op.dtype = element.dtype;
    call.op.root = root;
    call.op.count = static_cast<std::uint64_t>(tensor.numel()) * element.per_item;
    call.op.recv = o.inout(tensor).data_ptr();
    call.op.send = call.op.recv;
    o.calls.push_back(std::move(call));
}

}  // namespace

FtBackend::WorkPtr FtBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
    int root = static_cast<int>(opts.rootRank);
    while (true) {
        WorkPtr work = start(c10d::OpType::BROADCAST, "ftcomm:broadcast", tensors, [&](Operation& o) {
            add_broadcast(o, collective(FT_BROADCAST, opts), only(tensors, "broadcast"), root);
            o.result = tensors;
        });
        if (!stand_in_ || policy_ != FT_LOSSY) return work;
        // The failure is uniform, and waiting for it here keeps the second attempt at the same place among the operations
        // of every rank.
        try {
            work->wait(kNoTimeout);
        } catch (const FtError& e) {
            if (e.code != FT_PEER_FAILURE) return work;
        }
        if (work->isSuccess()) return work;
        const auto present = alive();
        const auto first = std::find(present.begin(), present.end(), 1);
        if (present[static_cast<std::size_t>(root)] != 0 || first == present.end()) return work;
        root = static_cast<int>(first - present.begin());
    }
}

void FtBackend::add_all_gather_list(Operation& o, const Tensors& outputs, const at::Tensor& input,
                                    const c10d::AllgatherOptions& opts) {
    check_tensor(input, "all_gather");
    check_list(outputs, "all_gather");
    check_same_kind(outputs[0], input, "all_gather");
    if (static_cast<int>(outputs.size()) != getSize()) {
        refuse(c10::str("all_gather: needs one output tensor for each of the ", getSize(), " ranks, ", outputs.size(),
                        " were given"));
    }
    const std::int64_t own = outputs[static_cast<std::size_t>(getRank())].numel();
    if (own != input.numel()) {
        refuse(c10::str("all_gather: output ", getRank(), " has ", own, " elements, the input ", input.numel(),
                        "; they must be equal"));
    }
    bool even = true;
    for (const auto& tensor : outputs) even = even && tensor.numel() == own;
    const Element element = movable(input);
    if (even) {
        Call call = collective(FT_ALL_GATHER, opts);
        call.op.dtype = element.dtype;
        call.op.count = static_cast<std::uint64_t>(input.numel()) * element.per_item;
        call.op.send = o.in(input).data_ptr();
        call.op.recv = o.out_list(outputs, /*sparse=*/false).data_ptr();
        o.calls.push_back(std::move(call));
        return;
    }
    // Uneven: a broadcast from each rank in turn, which the copy comes before.
    {
        at::AutoDispatchBelowADInplaceOrView below;
        outputs[static_cast<std::size_t>(getRank())].view({-1}).copy_(input.view({-1}));
        o.follow_caller();
    }
    for (int root = 0; root < getSize(); ++root) {
        add_broadcast(o, collective(FT_BROADCAST, opts), outputs[static_cast<std::size_t>(root)], root);
    }
}

FtBackend::WorkPtr FtBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
    return start(c10d::OpType::ALLGATHER, "ftcomm:all_gather", inputs, [&](Operation& o) {
        const at::Tensor& input = only(inputs, "all_gather");
        if (outputs.size() != 1) refuse("all_gather: takes one list of outputs");
        add_all_gather_list(o, outputs[0], input, opts);
        o.result = outputs[0];
    });
}

FtBackend::WorkPtr FtBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) {
    return start(c10d::OpType::ALLGATHER_COALESCED, "ftcomm:all_gather_coalesced", inputs, [&](Operation& o) {
        // outputs[r][i]: tensor i of rank r
        if (static_cast<int>(outputs.size()) != getSize()) {
            refuse(c10::str("all_gather_coalesced: needs one list of outputs for each of the ", getSize(), " ranks"));
        }
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            Tensors column;
            for (const auto& row : outputs) {
                if (row.size() != inputs.size()) refuse("all_gather_coalesced: each list of outputs needs one tensor per input");
                column.push_back(row[i]);
            }
            add_all_gather_list(o, column, inputs[i], opts);
        }
        for (const auto& row : outputs) o.result.insert(o.result.end(), row.begin(), row.end());
    });
}

void FtBackend::add_all_gather(Operation& o, const at::Tensor& output, const at::Tensor& input,
                               const c10d::AllgatherOptions& opts) {
    check_tensor(output, "all_gather_into_tensor");
    check_tensor(input, "all_gather_into_tensor");
    check_same_kind(output, input, "all_gather_into_tensor");
    if (output.numel() != input.numel() * getSize()) {
        refuse(c10::str("all_gather_into_tensor: the output has ", output.numel(), " elements; it must have ", getSize(), " x ",
                        input.numel(), ", the number of ranks times the input's"));
    }
    const Element element = movable(input);
    Call call = collective(FT_ALL_GATHER, opts);
    call.op.dtype = element.dtype;
    call.op.count = static_cast<std::uint64_t>(input.numel()) * element.per_item;
    call.op.send = o.in(input).data_ptr();
    call.op.recv = o.out(output).data_ptr();  // the block of a lost rank comes as zeros
    o.calls.push_back(std::move(call));
}

FtBackend::WorkPtr FtBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
    return start(c10d::OpType::_ALLGATHER_BASE, "ftcomm:all_gather_into_tensor", {input}, [&](Operation& o) {
        add_all_gather(o, output, input, opts);
        o.result = {output};
    });
}

FtBackend::WorkPtr FtBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& opts) {
    return start(c10d::OpType::COALESCED, "ftcomm:all_gather_into_tensor_coalesced", inputs, [&](Operation& o) {
        if (outputs.size() != inputs.size()) {
            refuse(c10::str("all_gather_into_tensor_coalesced: ", outputs.size(), " outputs for ", inputs.size(), " inputs"));
        }
        for (std::size_t i = 0; i < inputs.size(); ++i) add_all_gather(o, outputs[i], inputs[i], opts);
        o.result = outputs;
    });
}

FtBackend::WorkPtr FtBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
    return start(c10d::OpType::GATHER, "ftcomm:gather", inputs, [&](Operation& o) {
        const at::Tensor& input = only(inputs, "gather");
        const Element element = movable(input);
        Call call = collective(FT_GATHER, opts);
        call.op.dtype = element.dtype;
        call.op.root = static_cast<int>(opts.rootRank);
        call.op.count = static_cast<std::uint64_t>(input.numel()) * element.per_item;
        call.op.send = o.in(input).data_ptr();
        if (opts.rootRank == getRank()) {
            if (outputs.size() != 1 || static_cast<int>(outputs[0].size()) != getSize()) {
                refuse(c10::str("gather: the destination needs one output tensor for each of the ", getSize(), " ranks"));
            }
            check_list(outputs[0], "gather");
            check_same_kind(outputs[0][0], input, "gather");
            call.recv_counts = counts_of(outputs[0], element.per_item);
            call.recv_offsets = offsets_of(call.recv_counts);
            call.op.recv = o.out_list(outputs[0], /*sparse=*/policy_ != FT_RAISE).data_ptr();
            o.result = outputs[0];
        } else if (!outputs.empty() && !outputs[0].empty()) {
            refuse("gather: only the destination takes output tensors");
        }
        o.calls.push_back(std::move(call));
    });
}

FtBackend::WorkPtr FtBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
    return start(c10d::OpType::SCATTER, "ftcomm:scatter", outputs, [&](Operation& o) {
        const at::Tensor& output = only(outputs, "scatter");
        const Element element = movable(output);
        Call call = collective(FT_SCATTER, opts);
        call.op.dtype = element.dtype;
        call.op.root = static_cast<int>(opts.rootRank);
        call.op.count = static_cast<std::uint64_t>(output.numel()) * element.per_item;
        if (opts.rootRank == getRank()) {
            if (inputs.size() != 1 || static_cast<int>(inputs[0].size()) != getSize()) {
                refuse(c10::str("scatter: the source needs one input tensor for each of the ", getSize(), " ranks"));
            }
            check_list(inputs[0], "scatter");
            check_same_kind(inputs[0][0], output, "scatter");
            call.send_counts = counts_of(inputs[0], element.per_item);
            call.send_offsets = offsets_of(call.send_counts);
            call.op.send = o.in_list(inputs[0]).data_ptr();
        } else if (!inputs.empty() && !inputs[0].empty()) {
            refuse("scatter: only the source takes input tensors");
        }
        call.op.recv = o.out(output, /*sparse=*/policy_ != FT_RAISE).data_ptr();
        o.calls.push_back(std::move(call));
        o.result = outputs;
    });
}

FtBackend::WorkPtr FtBackend::barrier(const c10d::BarrierOptions& opts) {
    return start(c10d::OpType::BARRIER, "ftcomm:barrier", {},
                 [&](Operation& o) { o.calls.push_back(collective(FT_BARRIER, opts)); });
}

void FtBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
    // The library's timeout always names all that are missing.
    barrier(opts)->wait();
}

}  // namespace ftcomm_torch
