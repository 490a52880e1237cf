#include "communicator/last_result.h"

#include "collectives/results.h"

namespace ftcomm {

void LastResult::keep(const std::byte* result, std::size_t members) {
    kept = std::make_shared<Bytes>(result, result + shared_bytes(desc, members));
    desc.recv = kept->data();
}

void LastResult::keep_apart(std::size_t members) {
    if (flat == nullptr) return;
    keep(flat->room.data(), members);
    flat = nullptr;
}

std::unique_ptr<OpState> LastResult::hand_out(int rank, std::uint64_t signature) const {
    auto op = std::make_unique<OpState>(seq, desc, shape, grid, rank, signature, nullptr);
    op->kept = kept;
    std::uint32_t s = 0;
    for (const auto& l : labels)
        for (std::uint32_t i = 0; i < l.count; ++i, ++s)
            if (l.kind == LabelKind::Final) op->set_final(s, l.contributors);
    return op;
}

}  // namespace ftcomm
