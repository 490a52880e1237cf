// What a rank has for itself, copied bit by bit to where its result goes: nobody else waits for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "base/copy.h"

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
        if (n > 0 && meets(to, bytes)) std::memmove(to + done, from + done, n);
        else ftcomm::copy(to + done, from + done, n, into_for(bytes, kPastCaches));
        done += n;
    }

private:
    static constexpr std::uint64_t kPastCaches = 8u << 20;  // of less the next one to use it may find some in a shared cache
};

}  // namespace ftcomm
