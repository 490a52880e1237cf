#include "collectives/op_state.h"

#include <cstring>

#include "base/check.h"
#include "base/copy.h"

namespace ftcomm {

LabelKind initial_label(const Shape& shape, int rank, std::uint32_t block) {
    switch (shape.runs_as()) {
        case OpKind::Broadcast: return rank == shape.root ? LabelKind::Final : LabelKind::Empty;
        case OpKind::AllGather: return static_cast<std::uint32_t>(rank) == block ? LabelKind::Final : LabelKind::Empty;
        default: return LabelKind::Input;
    }
}

void OpState::begin(std::uint64_t seq_in, const OpDesc& desc_in, const Shape& shape_in, Grid grid_in, int rank,
                    std::uint64_t signature_in, RequestPtr request_in) {
    seq = seq_in;
    desc = desc_in;
    shape = shape_in;
    signature = signature_in;
    grid = grid_in;
    request = std::move(request_in);
    timeout = deadline = 0;
    started = entered = ran = timeout_proposed = false;
    team = {};
    repairs = 0;
    kept = nullptr;
    rank_ = rank;
    part_ = {};
    if (!room_.empty()) room_ = Bytes();
    if (desc.kind != shape.runs_as()) run_as_whole();
    own_ = {};
    if (shape.kind == OpKind::AllGather && desc.send != nullptr && request != nullptr) {  // of a helper all of it is kept
        const auto bytes = desc.count * size_of(desc.dtype);
        own_ = {static_cast<const std::byte*>(desc.send),
                static_cast<std::byte*>(desc.recv) + static_cast<std::size_t>(rank) * bytes, bytes};
        if (own_.from == own_.to) own_.done = bytes;
    }
    labels_.clear();
    sets_.clear();
    if constexpr (!kFaultTolerant) return;
    labels_.resize(grid.segments());
    const auto own = RankSet::only(rank);
    for (std::uint32_t b = 0; b < (grid.per_block == 0 ? 0 : grid.blocks); ++b) {
        const auto kind = initial_label(shape, rank, b);
        for (std::uint32_t i = 0; i < grid.per_block; ++i) {
            const auto s = b * grid.per_block + i;
            if (kind == LabelKind::Final) {
                set_final(s, own);
            } else {
                labels_[s] = static_cast<std::uint16_t>(kind);
            }
        }
    }
}

void OpState::run_as_whole() {
    const bool all_have_one = desc.kind != OpKind::Reduce;
    part_.to = all_have_one || rank_ == desc.root ? desc.recv : nullptr;
    part_.offset = all_have_one ? static_cast<std::uint64_t>(rank_) * desc.count : 0;
    part_.count = desc.count;
    desc.kind = shape.runs_as();
    desc.count = grid.block_elements;
    desc.recv = nullptr;
}

void OpState::make_room() {
    if (!is_part() || desc.count == 0 || (!room_.empty() && desc.recv == room_.data())) return;
    const auto block = grid.block_elements * size_of(desc.dtype);
    if (const auto* from = input(); desc.recv != nullptr || grid.blocks == 1) {
        room_.assign(from, from + grid.blocks * block);
    } else {
        room_.resize(grid.blocks * block);
        copy_bytes(room_.data() + static_cast<std::size_t>(rank_) * block, from, block);
    }
    desc.recv = room_.data();
}

void OpState::go_directly(std::uint64_t signature_in) {
    if (is_part()) {
        desc.kind = shape.kind;
        desc.count = part_.count;
        desc.recv = part_.to;
    }
    shape = shape.directly();
    signature = signature_in;
    grid = Grid::make(1, 0, 1);
    part_ = {};
    room_ = Bytes();
    labels_.clear();
    sets_.clear();
}

void OpState::give() {
    if (part_.to == nullptr || part_.count == 0) return;
    const auto size = size_of(desc.dtype), bytes = part_.count * size;
    auto* to = static_cast<std::byte*>(part_.to);
    const auto* from = static_cast<const std::byte*>(desc.recv) + part_.offset * size;
    for (std::uint32_t b = 0; b < grid.blocks; ++b) copy_bytes(to + b * bytes, from + b * grid.block_elements * size, bytes);
}

void OpState::set_final(std::uint32_t s, const RankSet& contributors) {
    if constexpr (!kFaultTolerant) return;
    if (labels_[s] >= 2) {
        // A final never changes: the same segment handed out twice has the same contributors.
        FT_CHECK(sets_[static_cast<std::size_t>(labels_[s]) - 2] == contributors, "op %llu segment %u is final with %s, not %s",
                 static_cast<unsigned long long>(seq), s, sets_[static_cast<std::size_t>(labels_[s]) - 2].text().c_str(),
                 contributors.text().c_str());
        return;
    }
    if (sets_.empty() || !(sets_.back() == contributors)) {
        std::size_t i = 0;
        while (i < sets_.size() && !(sets_[i] == contributors)) ++i;
        if (i == sets_.size()) { sets_.push_back(contributors); }
        labels_[s] = static_cast<std::uint16_t>(2 + i);
        return;
    }
    labels_[s] = static_cast<std::uint16_t>(2 + sets_.size() - 1);
}

void OpState::set_lost(std::uint32_t s) {
    if constexpr (!kFaultTolerant) return;
    FT_CHECK(labels_[s] < 2, "op %llu segment %u is final, and would be written over", static_cast<unsigned long long>(seq), s);
    labels_[s] = static_cast<std::uint16_t>(LabelKind::Empty);
}

void OpState::set_absent(std::uint32_t s) {
    if (auto* p = result(s)) std::memset(p, 0, segment_bytes(s));
    set_final(s, RankSet{});
}

bool OpState::all_final() const {
    for (auto l : labels_)
        if (l < 2) return false;
    return true;
}

std::vector<LabelRun> OpState::label_runs() const {
    std::vector<LabelRun> runs;
    label_runs(&runs);
    return runs;
}

void OpState::label_runs(std::vector<LabelRun>* runs) const {
    runs->clear();
    for (std::uint32_t s = 0; s < labels_.size(); ++s) {
        if (s > 0 && labels_[s] == labels_[s - 1]) {
            ++runs->back().count;
            continue;
        }
        auto& run = runs->emplace_back();
        run.count = 1;
        run.kind = label(s);
        if (run.kind == LabelKind::Final) run.contributors = contributors(s);
    }
}

void OpState::outcome(int rank, const RankSet& alive, std::uint64_t epoch, Outcome* to) const {
    auto& out = *to;
    out.chunks.clear();
    out.contributors = {};
    out.epoch = epoch;
    if (shape.kind == OpKind::AllToAll) {
        out.contributors = labels_.empty() ? alive : RankSet{};
        for (const auto& set : sets_) out.contributors = out.contributors | set;
        return;
    }
    if (is_part()) {
        out.contributors = labels_.empty() ? alive : contributors(0);
        if (part_.to != nullptr && part_.count > 0) out.chunks.push_back({0, part_.count, out.contributors});
        return;
    }
    bool first = true;
    const bool own_block = shape.kind == OpKind::ReduceScatter;
    if constexpr (!kFaultTolerant) out.chunks.push_back({0, grid.block_elements * (own_block ? 1 : grid.blocks), alive});
    for (std::uint32_t s = 0; s < labels_.size(); ++s) {
        if (labels_[s] < 2) continue;  // this rank has no result there (reduce away from the root, an absent block)
        if (own_block && grid.block_of(s) != static_cast<std::uint32_t>(rank)) continue;
        const auto& set = contributors(s);
        const auto offset = grid.offset(s) - (own_block ? static_cast<std::uint64_t>(rank) * grid.block_elements : 0);
        if (!out.chunks.empty() && out.chunks.back().contributors == set &&
            out.chunks.back().offset + out.chunks.back().count == offset) {
            out.chunks.back().count += grid.count(s);
        } else {
            out.chunks.push_back({offset, grid.count(s), set});
        }
        // all_gather: each block has one contributor; the operation's are those whose block arrived.
        if (shape.kind == OpKind::AllGather) {
            out.contributors = out.contributors | set;
        } else {
            out.contributors = first ? set : (out.contributors & set);
        }
        first = false;
    }
    if (first) out.contributors = alive;
}

const std::byte* OpState::input() const {
    const bool apart = !shape.shares_finals() || desc.recv == nullptr;
    return static_cast<const std::byte*>(apart ? desc.send : desc.recv);
}

const std::byte* OpState::input(std::uint32_t s) const { return input() + grid.offset(s) * size_of(desc.dtype); }

std::byte* OpState::result(std::uint32_t s) const {
    const auto size = size_of(desc.dtype);
    auto* base = static_cast<std::byte*>(desc.recv);
    switch (shape.runs_as()) {
        case OpKind::Reduce: return rank_ == shape.root ? base + grid.offset(s) * size : nullptr;
        case OpKind::ReduceScatter:
            if (grid.block_of(s) != static_cast<std::uint32_t>(rank_)) return nullptr;
            return base + (grid.offset(s) - static_cast<std::uint64_t>(rank_) * grid.block_elements) * size;
        default: return base + grid.offset(s) * size;
    }
}

}  // namespace ftcomm
