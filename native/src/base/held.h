// What is sent from where it lies, instead of a copy.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "base/bytes.h"

namespace ftcomm {

struct Held {
    ByteView bytes;
    // As long as it is kept they stay there, as they are. Null: they are lent (Transport::take_back).
    std::shared_ptr<const void> by;
    std::optional<std::uint32_t> sum{};  // their CRC-32C, if it is known
};

}  // namespace ftcomm
