// CRC-32C (Castagnoli): the checksum of frames and log records. With the CPU's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ftcomm {

// `seed` is the checksum of what came before: crc32c(b, n, crc32c(a, m)) is the checksum of a then b.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t seed = 0);

// The same of `from`, copied to `to` on the way: a copy waits for memory, so that the checksum costs next to nothing.
std::uint32_t crc32c_copy(void* to, const void* from, std::size_t size, std::uint32_t seed = 0);

// Without the instruction: what crc32c() falls back to, apart for tests.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t seed = 0);

}  // namespace ftcomm
