// What a tcp connection carries after its handshake: a link header, a frame header, the payload, zeros up to 16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "channel/frame.h"

namespace ftcomm::tcp {

inline constexpr std::uint32_t kWireMagic = 0x31544654;  // "TFT1"

enum WireFlags : std::uint32_t {
    kAckNow = 1,  // the sender wants an acknowledgement at once
};

struct WireHeader {
    std::uint32_t magic = kWireMagic;
    std::uint32_t header_crc = 0;   // crc32c of these 80 bytes with this field 0
    std::uint64_t seq = 0;          // 1, 2, ...; 0: no frame, only `ack` and `flags`
    std::uint64_t ack = 0;          // every frame up to here has arrived
    std::uint32_t payload_crc = 0;
    std::uint32_t flags = 0;
    FrameHeader frame;
};
static_assert(sizeof(WireHeader) == 80 && std::is_trivially_copyable_v<WireHeader>);

inline std::size_t wire_size(std::uint32_t payload) { return (sizeof(WireHeader) + payload + 15) & ~std::size_t{15}; }

}  // namespace ftcomm::tcp
