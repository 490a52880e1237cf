// CRC-32C by carry-less multiplication: several times the speed of the CRC instruction on long data.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ftcomm {

// Whether this machine has what crc32c_folded needs.
bool crc32c_folds();

// The register after `size` bytes (a multiple of 64, at least 256), from `crc` before them. Neither is inverted.
std::uint32_t crc32c_folded(const unsigned char* p, std::size_t size, std::uint32_t crc);
// The same, and `to` gets a copy.
std::uint32_t crc32c_folded_copy(unsigned char* to, const unsigned char* p, std::size_t size, std::uint32_t crc);
// Past the caches; `to` is at the start of a line of 64 bytes.
std::uint32_t crc32c_folded_stream(unsigned char* to, const unsigned char* p, std::size_t size, std::uint32_t crc);

}  // namespace ftcomm
