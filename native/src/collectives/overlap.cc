#include "collectives/overlap.h"

#include <algorithm>
#include <string>

#include "collectives/layout.h"

namespace ftcomm {

namespace {

struct Range {
    std::uint64_t from = 0, end = 0;
    bool meets(const Range& other) const { return std::max(from, other.from) < std::min(end, other.end); }
    bool operator==(const Range&) const = default;
};

Range range(const void* data, std::uint64_t offset, std::uint64_t bytes) {
    const auto from = reinterpret_cast<std::uintptr_t>(data) + offset;
    return {from, data == nullptr ? from : from + bytes};
}

}  // namespace

Status check_overlap(const OpDesc& d, int rank, std::size_t size) {
    if (size == 1 || d.send == nullptr || d.recv == nullptr) return {};
    const auto ranks = static_cast<int>(size);
    const auto element = size_of(d.dtype);
    const auto& per = d.per_rank();
    const Layout sends{per.send_counts, per.send_offsets, d.count}, recvs{per.recv_counts, per.recv_offsets, d.count};
    Range in, out = range(d.recv, 0, d.count * element), own;
    switch (d.kind) {
        case OpKind::Reduce:
            in = own = range(d.send, 0, d.count * element);
            if (rank != d.root) return {};
            break;
        case OpKind::Scatter:
            if (rank != d.root) return {};
            [[fallthrough]];
        case OpKind::ReduceScatter:
            in = range(d.send, 0, sends.end(ranks) * element);
            own = range(d.send, sends.offset(rank) * element, d.count * element);
            break;
        case OpKind::AllToAll:
            in = range(d.send, 0, sends.end(ranks) * element);
            out = range(d.recv, 0, recvs.end(ranks) * element);
            break;
        default: return {};
    }
    if (!in.meets(out) || out == own) return {};
    return Status::error(Code::Invalid, std::string("the output of ") + to_string(d.kind) +
                                            " lies over its input, which other ranks still need: give it memory of its own" +
                                            (d.kind == OpKind::AllToAll ? ""
                                             : d.kind == OpKind::Reduce ? ", or the input itself"
                                                                        : ", or this rank's block of the input"));
}

}  // namespace ftcomm
