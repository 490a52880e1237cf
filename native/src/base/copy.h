// Copying what nobody reads soon.
#pragma once

#include <cstddef>
#include <cstring>

namespace ftcomm {

// As memcpy, but the destination does not come into the caches: it costs no read of the old content there, and what is in use stays. Its
// end is ordered before later stores, as that of memcpy is.
void copy_past_cache(void* to, const void* from, std::size_t bytes);

enum class Into { Caches, Memory };
// By default for a buffer: of a longer one a core's cache has lost the start when the end has come.
constexpr Into into_for(std::size_t bytes, std::size_t memory_from = 2u << 20) {
    return bytes >= memory_from ? Into::Memory : Into::Caches;
}

inline void copy(void* to, const void* from, std::size_t bytes, Into into) {
    if (into == Into::Memory) copy_past_cache(to, from, bytes);
    else std::memcpy(to, from, bytes);
}

}  // namespace ftcomm
