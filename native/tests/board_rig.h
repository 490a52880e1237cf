// Memory for boards without a host.
#pragma once

#include <deque>

#include "base/bytes.h"
#include "transport/transport.h"

namespace ftcomm::unit {

// Of one process, in which a place is an address.
class OneProcess final : public Transport {
public:
    std::byte* reserve(int, std::uint32_t) override { return nullptr; }
    void commit(int, const FrameHeader&) override {}
    void attach(int, std::uint32_t) override {}
    void detach(int) override {}
    std::uint32_t max_payload() const override { return 0; }
    Window make_window(std::size_t bytes, Room) override {
        if (room_-- <= 0) return {};
        auto& memory = windows_.emplace_back(bytes);
        return {memory.data(), reinterpret_cast<std::uintptr_t>(memory.data())};
    }
    const std::byte* look(int, std::uint64_t place, std::size_t) override {
        return reinterpret_cast<const std::byte*>(place);  // NOLINT
    }
    int room_ = 1000;

private:
    std::deque<Bytes> windows_;
};

}  // namespace ftcomm::unit
