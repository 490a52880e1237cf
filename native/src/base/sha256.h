// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): proof of the job's secret in handshakes. Not for bulk data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace ftcomm {

using Sha256Digest = std::array<std::byte, 32>;

class Sha256 {
public:
    Sha256& update(ByteView data);
    Sha256Digest finish();  // once; the object is used up

private:
    void block(const std::byte* p);

    std::array<std::uint32_t, 8> state_{0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                        0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    std::array<std::byte, 64> pending_{};
    std::size_t filled_ = 0;
    std::uint64_t total_ = 0;
};

Sha256Digest sha256(ByteView data);
Sha256Digest hmac_sha256(ByteView key, ByteView message);

// Takes the same time wherever the first difference is; different lengths are unequal at once.
bool constant_time_equal(ByteView a, ByteView b);

}  // namespace ftcomm
