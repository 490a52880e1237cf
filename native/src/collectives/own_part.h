// What a rank has for itself, copied bit by bit to where its result goes: nobody else waits for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace ftcomm {

struct OwnPart {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    std::uint64_t bytes = 0, done = 0;

    std::uint64_t left() const { return bytes - done; }
    bool meets(const std::byte* other, std::uint64_t length) const {
        return std::less<>{}(from, other + length) && std::less<>{}(other, from + bytes);
    }
    void copy(std::uint64_t most) {
        const auto n = std::min(left(), most);
        if (n > 0) std::memmove(to + done, from + done, n);
        done += n;
    }
};

}  // namespace ftcomm
