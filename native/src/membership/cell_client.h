// The authority as the protocol sees it: callbacks instead of request numbers, the boot check (M3), and unknown outcomes resolved.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "membership/authority.h"
#include "membership/rules.h"

namespace ftcomm {

class CellClient {
public:
    enum class Result : std::uint8_t { Value, Swapped, Conflict, Lost };
    using Callback = std::function<void(Result, const Bytes& value)>;

    CellClient(Authority& authority, std::uint64_t boot, const Rules& rules)
        : authority_(authority), boot_(boot), rules_(rules) {}

    void read(const std::string& key, Callback done);
    void compare_and_set(const std::string& key, Bytes expected, Bytes desired, Callback done);
    void on_reply(const CellReply& reply);
    bool idle() const { return pending_.empty(); }

private:
    struct Pending {
        std::string key;
        Bytes expected, desired;
        bool is_swap = false;
        bool rereading = false;
        Callback done;
    };
    Authority& authority_;
    std::uint64_t boot_;
    Rules rules_;
    std::uint64_t next_ = 1;
    std::map<std::uint64_t, Pending> pending_;
};

}  // namespace ftcomm
