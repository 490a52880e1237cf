// The head cells: the only place where decisions are made (rules M1-M4).
#pragma once

#include <cstdint>
#include <string>

#include "base/bytes.h"

namespace ftcomm {

enum class CellResult : std::uint8_t {
    Value,        // a read: `value` is the content (empty: never written)
    Swapped,      // compare-and-set took effect
    Conflict,     // it did not; `value` is the current content
    Unknown,      // the request may or may not have taken effect: read again
    Lost,         // the authority is gone for good
};

struct CellReply {
    std::uint64_t request = 0;
    CellResult result = CellResult::Lost;
    Bytes value;
    std::uint64_t boot = 0;  // the authority's boot nonce as read after the operation (M3)
};

// Requests are asynchronous; each gets exactly one Node::on_cell(reply), never from inside the call.
class Authority {
public:
    virtual ~Authority() = default;
    virtual void read(const std::string& key, std::uint64_t request) = 0;
    // Expects the cell to hold exactly `expected` (empty: never written).
    virtual void compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) = 0;
};

}  // namespace ftcomm
