// What is sent from where it lies, instead of a copy.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "base/bytes.h"

namespace ftcomm {

struct Held {
    ByteView bytes;
    std::shared_ptr<const void>
        by;  // as long as it is kept they stay there, as they are; null: they are lent (Transport::take_back)
    std::optional<std::uint32_t> sum{};  // their CRC-32C, if it is known
};

}  // namespace ftcomm
