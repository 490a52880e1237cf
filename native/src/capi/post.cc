#include "capi/post.h"

#include <algorithm>
#include <cmath>

namespace ftcomm::capi {

Time seconds_or_default(double seconds) {
    return std::isfinite(seconds) && seconds > 0 ? static_cast<Time>(std::min(seconds, 1e9) * 1e9) : 0;
}

int check_op(const ft_op* op) {
    if (op == nullptr) return fail(Code::Invalid, "op must not be NULL");
    if (op->kind < FT_ALL_REDUCE || op->kind > FT_BARRIER) return fail(Code::Invalid, "there is no such operation");
    if (op->dtype < 0 || op->dtype >= kDTypes) return fail(Code::Invalid, "there is no such dtype");
    if (op->op < 0 || op->op >= kReduceOps) return fail(Code::Invalid, "there is no such reduction");
    if (op->algorithm < 0 || op->algorithm > static_cast<int>(Algorithm::RingLogged) ||
        op->algorithm == static_cast<int>(Algorithm::Direct))
        return fail(Code::Invalid, "there is no such algorithm");
    return FT_OK;
}

OpDesc described(const ft_op& op, int size) {
    OpDesc d;
    d.kind = static_cast<OpKind>(op.kind);
    d.dtype = static_cast<DType>(op.dtype);
    d.op = static_cast<ReduceOp>(op.op);
    d.algorithm = static_cast<Algorithm>(op.algorithm);
    d.root = op.root;
    d.count = op.count;
    d.send = op.send;
    d.recv = op.recv;
    if (op.send_counts != nullptr || op.send_offsets != nullptr || op.recv_counts != nullptr || op.recv_offsets != nullptr) {
        const auto copy = [&](const uint64_t* from) {
            return from != nullptr ? std::vector<uint64_t>(from, from + size) : std::vector<uint64_t>();
        };
        d.layout = std::make_shared<const PerRank>(
            PerRank{copy(op.send_counts), copy(op.send_offsets), copy(op.recv_counts), copy(op.recv_offsets)});
    }
    d.factor = op.factor;
    d.timeout = seconds_or_default(op.timeout);
    return d;
}

}  // namespace ftcomm::capi
