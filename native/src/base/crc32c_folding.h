// CRC-32C by carry-less multiplication: several times the speed of the CRC instruction on long data.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ftcomm {

// The register after `size` bytes (a multiple of 64, at least 256), from `crc` before them. Neither is inverted.
struct Folding {
    std::uint32_t (*sum)(const unsigned char* p, std::size_t size, std::uint32_t crc);
    // The same, and `to` gets a copy.
    std::uint32_t (*copy)(unsigned char* to, const unsigned char* p, std::size_t size, std::uint32_t crc);
    // Past the caches; `to` is at the start of a line of 64 bytes.
    std::uint32_t (*copy_past_caches)(unsigned char* to, const unsigned char* p, std::size_t size, std::uint32_t crc);
};

// By so many bits at once (512 or 256), or null: this machine cannot.
const Folding* crc32c_folding_by(int bits);
// By as many as this machine can, or null.
const Folding* crc32c_folding();

}  // namespace ftcomm
