// What a process that is killed leaves in its windows: all that it showed, as it stood. To end its node would put that in order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "transport/transport.h"

namespace ftcomm {

// `windows`: the process's. Of each what its node may take back: the ticket, and the line of a board, or the first of other tickets.
template <class End>
void end_as_if_killed(const std::vector<std::byte*>& windows, End&& end) {
    constexpr std::size_t kTicket = sizeof(std::uint64_t), kLine = 64, kHead = Transport::kWindowHead;
    std::vector<std::pair<std::byte*, Bytes>> kept;
    for (auto* at : windows) {
        kept.emplace_back(at, Bytes(at, at + kTicket));
        kept.emplace_back(at + kHead, Bytes(at + kHead, at + kHead + kLine));
    }
    end();
    for (const auto& [at, bytes] : kept) std::ranges::copy(bytes, at);
}

}  // namespace ftcomm
