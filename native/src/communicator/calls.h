// What a call means on a communicator: its shape, where its segments lie, and the signature by which ranks see that all have called the same
// (C8). The same on all ranks, from the call, the communicator's size and the configuration.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "collectives/op_state.h"
#include "collectives/records.h"

namespace ftcomm {

struct Core;

class Calls {
public:
    Calls(const Core& core, const CommSpec& spec);

    Status check(const OpDesc& desc) const;
    Shape shape_of(const OpDesc& desc, Grid* grid) const;
    std::uint64_t signature_of(const Shape& shape);
    std::uint64_t members_hash() const { return members_hash_; }

    // The last call that was found right is kept: the next one is often the same.
    bool is_last(const OpDesc& desc) const;
    void keep(const OpDesc& desc);
    const Shape& shape() const { return shape_; }
    const Grid& grid() const { return grid_; }

    // Of a flat one: what goes up, sums in float32 at least, and what comes down have to fit a frame.
    bool fits_tree(OpKind kind, std::uint64_t bytes, std::size_t element) const;
    // Of more ranks than a few, more share the processors and their caches: to read is faster then, as where nothing is streamed.
    bool streams_decide() const;

private:
    bool replays() const { return spec_.policy == Policy::Replay; }
    bool is_flat(const OpDesc& desc) const;
    bool prefers_few_messages(const OpDesc& desc, std::uint64_t bytes) const;
    bool may_exchange_in_windows(const OpDesc& desc) const;

    const Core& core_;
    const CommSpec& spec_;
    std::uint64_t members_hash_ = 0;
    OpDesc last_;  // its buffers left aside
    Shape shape_;
    Grid grid_;
    bool any_ = false;
    Shape signed_;  // the shape that signature_ is of
    std::uint64_t signature_ = 0;
};

}  // namespace ftcomm
