// Sparse all-reduce: everybody gets everybody's entries, and adds them up.
#include "backend.h"

namespace ftcomm_torch {
namespace {

// Coordinates and values of one rank, padded to the largest rank's number of entries.
at::Tensor padded(const at::Tensor& tensor, std::int64_t dim, std::int64_t entries) {
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
    sizes[static_cast<std::size_t>(dim)] = entries;
    at::Tensor out = at::zeros(sizes, tensor.options());
    out.narrow(dim, 0, tensor.size(dim)).copy_(tensor);
    return out;
}

std::vector<at::Tensor> like(const at::Tensor& tensor, int size) {
    std::vector<at::Tensor> out;
    for (int r = 0; r < size; ++r) out.push_back(at::zeros_like(tensor));
    return out;
}

}  // namespace

FtBackend::WorkPtr FtBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
    // The sizes are learnt by a first all-gather, which this call waits for: posting the second one later, from another
    // thread, would put it at a different place among the operations of each rank.
    at::AutoDispatchBelowADInplaceOrView below;
    const at::NoGradGuard no_grad;
    std::exception_ptr error;
    bool begun = false;  // the others are in the first all-gather, or will be, and go on to the second
    WorkPtr sizes;
    at::Tensor input;
    std::vector<std::vector<at::Tensor>> indices(1), values(1), counts(1);
    std::vector<WorkPtr> works;
    c10d::AllgatherOptions gather;
    gather.timeout = opts.timeout;
    try {
        if (tensors.size() != 1) refuse("sparse all_reduce: takes one tensor");
        if (tensors[0].layout() != at::kSparse) {
            refuse(c10::str("sparse all_reduce: layout ", tensors[0].layout(), " is not supported; use COO, or .to_dense()"));
        }
        const Reduction op = reduction(opts.reduceOp);
        if (op.op != 0 && op.op != 1) refuse("sparse all_reduce: only SUM and AVG are defined; use .to_dense() for others");
        begun = !tensors[0].device().is_cpu();  // which may fail here alone
        input = tensors[0].coalesce();
        at::Tensor own = at::tensor({input._nnz()}, at::kLong).to(input.device());
        counts[0] = like(own, getSize());
        std::vector<at::Tensor> send{own};
        begun = true;
        sizes = allgather(counts, send, gather);
        sizes->wait();
        std::int64_t most = 0;
        for (const auto& count : counts[0]) most = std::max(most, count.item<std::int64_t>());
        std::vector<at::Tensor> own_indices{padded(input._indices().contiguous(), 1, most)};
        std::vector<at::Tensor> own_values{padded(input._values().contiguous(), 0, most)};
        indices[0] = like(own_indices[0], getSize());
        values[0] = like(own_values[0], getSize());
        works = {allgather(indices, own_indices, gather), allgather(values, own_values, gather)};
    } catch (const FtError&) {  // a mistake, or what all of them learn, but for a wait that was given up here
        error = std::current_exception();
        if (sizes && static_cast<FtWork&>(*sizes).operation().given_up()) break_order(error);
    } catch (const std::exception&) {
        error = std::current_exception();
        if (begun) break_order(error);
    }
    return start(c10d::OpType::_ALLREDUCE_SPARSE, "ftcomm:all_reduce_sparse", {}, [&](Operation& o) {
        if (error) std::rethrow_exception(error);
        // A barrier is this operation's own request: it is done when all have both parts, or fails on all.
        o.calls.push_back(collective(FT_BARRIER, opts));
        o.result = tensors;
        o.on_device_of(input);
        const bool average = opts.reduceOp.op_ == c10d::ReduceOp::AVG;
        const auto add_up = [works, counts, indices, values, input, target = tensors[0], average](Operation& self) {
            for (const auto& work : works) work->wait();
            for (const auto& parts : {indices[0], values[0]})
                for (const auto& part : parts) self.used_at_end(part);
            at::Tensor sum;
            std::int64_t contributors = 0;
            const auto flags = static_cast<FtWork&>(*works[1]).operation().contributors();
            for (std::size_t r = 0; r < flags.size(); ++r) {
                if (flags[r] == 0) continue;
                const std::int64_t entries = counts[0][r].item<std::int64_t>();
                at::Tensor part = at::_sparse_coo_tensor_unsafe(indices[0][r].narrow(1, 0, entries),
                                                                values[0][r].narrow(0, 0, entries), input.sizes());
                sum = sum.defined() ? sum + part : part;
                ++contributors;
            }
            if (!sum.defined()) return;
            if (average && contributors > 1) sum = sum / contributors;
            target.copy_(sum.coalesce());
            self.made_at_end(target._indices());
            self.made_at_end(target._values());
        };
        o.at_end(add_up);
    });
}

}  // namespace ftcomm_torch
