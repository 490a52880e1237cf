// Operations between pairs of ranks.
#include "backend.h"

namespace ftcomm_torch {
namespace {

void set_pairs(std::vector<std::uint64_t>& counts, std::vector<std::uint64_t>& offsets,
               const std::vector<std::uint64_t>& elements) {
    std::uint64_t at = 0;
    counts = elements;
    offsets.clear();
    for (const auto count : elements) {
        offsets.push_back(at);
        at += count;
    }
}

// Elements for each rank: rows of dimension 0, equally many when no split is given.
std::vector<std::uint64_t> rows(const at::Tensor& tensor, const std::vector<std::int64_t>& splits, int size,
                                std::uint64_t per_item, const char* what) {
    const std::int64_t dim0 = tensor.dim() > 0 ? tensor.size(0) : 1;
    std::int64_t row = 1;  // also where dimension 0 is empty
    for (std::int64_t d = 1; d < tensor.dim(); ++d) row *= tensor.size(d);
    std::vector<std::uint64_t> counts;
    if (splits.empty()) {
        if (dim0 % size != 0) {
            refuse(c10::str("all_to_all_single: the ", what, "'s first dimension (", dim0, ") can't be divided by the ", size,
                            " ranks; give split sizes"));
        }
        counts.assign(static_cast<std::size_t>(size), static_cast<std::uint64_t>(dim0 / size * row) * per_item);
        return counts;
    }
    std::int64_t sum = 0;
    for (const auto split : splits) {
        if (split < 0) refuse(c10::str("all_to_all_single: a split size of the ", what, " is negative"));
        sum += split;
        counts.push_back(static_cast<std::uint64_t>(split * row) * per_item);
    }
    if (static_cast<int>(splits.size()) != size || sum != dim0) {
        refuse(c10::str("all_to_all_single: the ", what, "'s split sizes must be ", size, " numbers that add up to ", dim0));
    }
    return counts;
}

}  // namespace

FtBackend::WorkPtr FtBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                            std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
    return start(c10d::OpType::ALLTOALL_BASE, "ftcomm:all_to_all_single", {input}, [&](Operation& o) {
        check_tensor(output, "all_to_all_single");
        check_tensor(input, "all_to_all_single");
        check_same_kind(output, input, "all_to_all_single");
        const Element element = movable(input);
        Call call = collective(FT_ALL_TO_ALL, opts);
        call.op.dtype = element.dtype;
        const auto sends = rows(input, input_splits, getSize(), element.per_item, "input");
        const auto takes = rows(output, output_splits, getSize(), element.per_item, "output");
        if (input_splits.empty() && output_splits.empty() && sends == takes) {
            call.op.count = sends[0];  // as many for each: a small one takes one message time then
        } else {
            set_pairs(call.send_counts, call.send_offsets, sends);
            set_pairs(call.recv_counts, call.recv_offsets, takes);
        }
        call.op.send = o.in(input).data_ptr();
        call.op.recv = o.out(output, /*sparse=*/policy_ != FT_RAISE).data_ptr();
        o.calls.push_back(std::move(call));
        o.result = {output};
    });
}

FtBackend::WorkPtr FtBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
    return start(c10d::OpType::ALLTOALL, "ftcomm:all_to_all", inputs, [&](Operation& o) {
        check_list(outputs, "all_to_all");
        check_list(inputs, "all_to_all");
        check_same_kind(outputs[0], inputs[0], "all_to_all");
        if (static_cast<int>(outputs.size()) != getSize() || static_cast<int>(inputs.size()) != getSize()) {
            refuse(c10::str("all_to_all: needs one input and one output tensor for each of the ", getSize(), " ranks"));
        }
        const Element element = movable(inputs[0]);
        const auto counts = [&](const Tensors& tensors) {
            std::vector<std::uint64_t> elements;
            for (const auto& tensor : tensors) {
                elements.push_back(static_cast<std::uint64_t>(tensor.numel()) * element.per_item);
            }
            return elements;
        };
        Call call = collective(FT_ALL_TO_ALL, opts);
        call.op.dtype = element.dtype;
        set_pairs(call.send_counts, call.send_offsets, counts(inputs));
        set_pairs(call.recv_counts, call.recv_offsets, counts(outputs));
        call.op.send = o.in_list(inputs).data_ptr();
        call.op.recv = o.out_list(outputs, /*sparse=*/policy_ != FT_RAISE).data_ptr();
        o.calls.push_back(std::move(call));
        o.result = outputs;
    });
}

FtBackend::WorkPtr FtBackend::pairwise(bool sending, Tensors& tensors, int peer, int tag) {
    const char* what = sending ? "send" : "recv";
    const auto type = sending ? c10d::OpType::SEND : peer == FT_ANY_OR_FAIL ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
    return start(type, sending ? "ftcomm:send" : "ftcomm:recv", tensors, [&](Operation& o) {
        const at::Tensor& tensor = only(tensors, what);
        Call call;
        call.kind = sending ? Call::Kind::Send : Call::Kind::Recv;
        call.bytes = tensor.nbytes();
        call.peer = peer;
        call.tag = tag;
        if (!sending) {  // before the copy to a device, if there is one
            o.at_end([bytes = call.bytes](Operation& self) {
                if (self.received() == bytes) return;
                refuse(c10::str("recv: the tensor has ", bytes, " bytes, but rank ", self.source(), " sent ", self.received(),
                                "; sizes and types must be equal on both sides"),
                       FT_MISMATCH);
            });
        }
        call.data = (sending ? o.in(tensor) : o.out(tensor)).data_ptr();
        o.calls.push_back(std::move(call));
        o.result = tensors;
    });
}

FtBackend::WorkPtr FtBackend::send(Tensors& tensors, int dst, int tag) { return pairwise(true, tensors, dst, tag); }
FtBackend::WorkPtr FtBackend::recv(Tensors& tensors, int src, int tag) { return pairwise(false, tensors, src, tag); }
// A Work cannot report a death and stay pending: it ends with it, and torch.distributed has no way to acknowledge the death, but
// ftcomm.torch.communicator(group).ack_failed() does.
FtBackend::WorkPtr FtBackend::recvAnysource(Tensors& tensors, int tag) { return pairwise(false, tensors, FT_ANY_OR_FAIL, tag); }

}  // namespace ftcomm_torch
