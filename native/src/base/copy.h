// Copying data: into the caches, or past them what nobody reads soon.
#pragma once

#include <cstddef>
#include <cstdint>
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

// From some kilobytes on memcpy is one instruction (rep movsb) where the C library takes that for fast. On AMD's processors since Zen 3 it is not
// if the destination begins 1 to 31 bytes further into its page than the source does into its own: 2 GB/s instead of 40
// (glibc bug 30994, in use up to 2.39). Large arrays of NumPy begin 16 bytes into one, and many sources with one.
inline bool is_slow_to_move(const void* to, const void* from) {
    return ((reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) & 4095u) - 1 < 31;
}
void copy_by_vectors(void* to, const void* from, std::size_t bytes);

// As memcpy; of no bytes also between null pointers.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
    constexpr std::size_t kMoved = 2048;  // of less no C library makes that one instruction
    if (bytes >= kMoved && is_slow_to_move(to, from)) copy_by_vectors(to, from, bytes);
    else if (bytes > 0) std::memcpy(to, from, bytes);
}

inline void copy(void* to, const void* from, std::size_t bytes, Into into) {
    if (into == Into::Memory) copy_past_cache(to, from, bytes);
    else copy_bytes(to, from, bytes);
}

}  // namespace ftcomm
