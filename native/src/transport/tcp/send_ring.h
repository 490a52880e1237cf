// Frames that the peer has not acknowledged yet, each in one piece, in a bounded ring of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "base/held.h"

namespace ftcomm::tcp {

class SendRing {
public:
    struct Frame {
        std::byte* data;
        std::size_t size;  // in the ring
        Held outside{};  // follows it
        bool sealed = true;  // the header is complete
        std::size_t whole() const { return size + outside.bytes.size(); }
    };

    explicit SendRing(std::size_t capacity) : capacity_(capacity) {}

    // Room for a frame of `size` bytes (a multiple of 16), or nullptr. A second call replaces the first.
    std::byte* reserve(std::size_t size);
    // The reserved frame becomes number last() + 1; size is at most what was reserved. outside: what follows it, of a frame that is not sealed.
    void commit(std::size_t size, const Held& outside = {});
    void release_to(std::uint64_t number);  // frames up to and including `number` are not needed any more

    std::uint64_t first() const { return first_; }                       // lowest frame kept
    std::uint64_t last() const { return first_ + frames_.size() - 1; }   // first() - 1: none kept
    bool empty() const { return frames_.empty(); }
    Frame& at(std::uint64_t number);
    std::size_t capacity() const { return capacity_; }
    // No more is held than the ring holds.
    bool has_room_outside(std::size_t bytes) const { return outside_ + bytes <= capacity_; }

private:
    std::size_t capacity_;
    std::unique_ptr<std::byte[]> memory_;  // allocated at first use and left untouched: most links carry little
    std::deque<Frame> frames_;
    std::uint64_t first_ = 1;
    std::byte* reserved_ = nullptr;
    std::size_t reserved_size_ = 0;
    std::size_t outside_ = 0;
};

}  // namespace ftcomm::tcp
