// Both ends of a ring: one writer, one reader, frames contiguous and 16-byte aligned.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/bytes.h"
#include "channel/frame.h"
#include "transport/shm/layout.h"

namespace ftcomm::shm {

class RingWriter {
public:
    explicit RingWriter(Ring* ring) : ring_(ring), capacity_(ring->capacity), window_(std::min(capacity_, kUsualRing)) {}

    // Space for a payload in the ring itself, or nullptr: full; then the reader's next taken() returns true.
    std::byte* reserve(std::uint32_t length);
    void commit(const FrameHeader& header);
    // The same, in the one sequentially consistent order, for a reader that may be looking at the ring (Mailbox::watching).
    void commit_in_order(const FrameHeader& header);
    // Fault injection: the same frame with a length that cannot be.
    void commit_corrupt(const FrameHeader& header);
    void abandon() { reserved_ = false; }
    const Ring* ring() const { return ring_; }

private:
    std::byte* data() const { return reinterpret_cast<std::byte*>(ring_ + 1); }
    bool fits(std::uint64_t need) const;
    void write(const FrameHeader& header, std::uint32_t length_word, std::memory_order order);

    Ring* ring_;
    std::uint64_t capacity_;
    std::uint64_t window_;  // bytes of frames that may lie in it: who is far ahead finds the reader's data gone from the caches
    std::uint64_t head_ = 0;
    std::uint64_t tail_ = 0;  // as last read
    std::uint64_t skip_ = 0;  // bytes to the end of the ring that the reserved frame leaves out
    std::uint64_t skipped_ = 0, skipped_at_ = 0;  // that the last such frame left out, and where
    std::uint32_t length_ = 0;
    std::uint32_t light_ = 0;  // short frames since the last long one
    bool reserved_ = false;
};

// Whether there is something that its reader has not taken, as far as the ring says. From any thread of the reader's process.
inline bool has_frames(const Ring& ring) {
    return ring.head.load(std::memory_order_acquire) != ring.tail.load(std::memory_order_relaxed);
}

class RingReader {
public:
    enum class Next { Frame, Empty, Broken };

    // As long as its maker said, whatever is said later.
    RingReader(Ring* ring, std::uint64_t capacity) : ring_(ring), capacity_(capacity) {}

    // The next frame, left in place until taken(). The sender is another process, perhaps a mad one: the header is a copy,
    // and lengths that cannot be are Broken.
    Next peek(FrameHeader* header, ByteView* payload);
    void take();
    // By its own count, whatever others have written. In the one sequentially consistent order (Mailbox::watching).
    bool has_frames() const { return ring_->head.load(std::memory_order_seq_cst) != tail_; }
    // Where has_frames() of the ring would go on saying that there is something.
    void mend_tail() { ring_->tail.store(tail_, std::memory_order_release); }
    // After a batch of take()s: whether the writer asked to be told of the room.
    bool writer_waits();

    const Ring* ring() const { return ring_; }
    std::uint64_t capacity() const { return capacity_; }

private:
    const std::byte* data() const { return reinterpret_cast<const std::byte*>(ring_ + 1); }

    Ring* ring_;
    std::uint64_t capacity_;
    std::uint64_t head_ = 0;  // as last read
    std::uint64_t tail_ = 0;
    std::uint64_t next_ = 0;  // tail after the frame that peek() returned
};

}  // namespace ftcomm::shm
