// CRC-32C (Castagnoli): the checksum of frames and log records. With the CPU's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/copy.h"

namespace ftcomm {

// `seed` is the checksum of what came before: crc32c(b, n, crc32c(a, m)) is the checksum of a then b.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t seed = 0);

// Of two parts that follow each other, from the checksum of each: a few instructions for every bit of the length of the second.
std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::size_t second_size);

// The same of `from`, copied to `to` on the way: a copy waits for memory, so that the checksum costs next to nothing. It is the checksum of
// what was copied, whatever becomes of the source. Into memory: past the caches, as by copy_past_cache.
std::uint32_t crc32c_copy(void* to, const void* from, std::size_t size, std::uint32_t seed = 0, Into into = Into::Caches);

// What they fall back to without the instructions, apart for tests.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t seed = 0);
std::uint32_t crc32c_copy_portable(void* to, const void* from, std::size_t size, std::uint32_t seed, Into into);

std::string crc_text(std::uint32_t crc);  // as people read it: 8 hexadecimal digits

}  // namespace ftcomm
