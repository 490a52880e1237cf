#include "transport/shm/ring.h"

#include <cstddef>
#include <cstring>

#include "base/check.h"

namespace ftcomm::shm {
namespace {

constexpr std::uint64_t kHeader = sizeof(FrameHeader);
// Beyond this place an empty ring starts over at its beginning, so that light traffic stays in few, warm pages: so many frames that are
// shorter, one after another.
constexpr std::uint64_t kRewind = 256u << 10;
constexpr std::uint32_t kLightLength = 4u << 10, kLightFrames = 64;

static_assert(offsetof(FrameHeader, length) == 0, "the reader looks for kWrap in place of a length");

constexpr std::uint64_t frame_bytes(std::uint64_t length) { return kHeader + ((length + 15) & ~std::uint64_t{15}); }

}  // namespace

bool RingWriter::fits(std::uint64_t need) const {
    const auto used = head_ - tail_;
    if (used > capacity_ || capacity_ - used < skip_ + need) return false;  // a mad tail reads as full
    const auto left_out = tail_ <= skipped_at_ ? skipped_ : 0;
    return used - left_out + need <= window_;
}

std::byte* RingWriter::reserve(std::uint32_t length) {
    auto need = frame_bytes(length);
    if (need > window_ / 2) return nullptr;
    auto place = head_ & (capacity_ - 1);
    skip_ = capacity_ - place < need ? capacity_ - place : 0;
    light_ = length < kLightLength ? light_ + 1 : 0;
    if (skip_ == 0 && place >= kRewind && place >= need && light_ >= kLightFrames) {
        tail_ = ring_->tail.load(std::memory_order_acquire);
        if (tail_ == head_) skip_ = capacity_ - place;
    }
    if (!fits(need)) {
        tail_ = ring_->tail.load(std::memory_order_acquire);
        if (!fits(need)) {
            // The reader moves its tail, then looks at the flag; here the flag first, then the tail again.
            ring_->wants_room.store(1, std::memory_order_seq_cst);
            tail_ = ring_->tail.load(std::memory_order_seq_cst);
            // The flag stays if there is room now: it may be an earlier frame's, too, which still waits to be told.
            if (!fits(need)) return nullptr;
        }
    }
    reserved_ = true;
    length_ = length;
    return data() + ((place + skip_) & (capacity_ - 1)) + kHeader;
}

void RingWriter::commit(const FrameHeader& header) { write(header, header.length, std::memory_order_release); }

void RingWriter::commit_in_order(const FrameHeader& header) { write(header, header.length, std::memory_order_seq_cst); }

void RingWriter::commit_corrupt(const FrameHeader& header) { write(header, kWrap - 1, std::memory_order_seq_cst); }

void RingWriter::write(const FrameHeader& header, std::uint32_t length_word, std::memory_order order) {
    FT_CHECK(reserved_ && header.length <= length_, "commit of %u bytes after reserve of %u", header.length, length_);
    reserved_ = false;
    auto place = head_ & (capacity_ - 1);
    if (skip_ != 0) {
        std::memcpy(data() + place, &kWrap, sizeof kWrap);
        skipped_at_ = head_;
        skipped_ = skip_;
        head_ += skip_;
        place = 0;
    }
    std::memcpy(data() + place, &header, kHeader);
    std::memcpy(data() + place, &length_word, sizeof length_word);
    head_ += frame_bytes(header.length);
    ring_->head.store(head_, order);
}

RingReader::Next RingReader::peek(FrameHeader* header, ByteView* payload) {
    if (head_ == tail_) head_ = ring_->head.load(std::memory_order_acquire);
    for (int turn = 0; turn < 2; ++turn) {
        auto available = head_ - tail_;
        if (available == 0) return Next::Empty;
        if (available > capacity_ || head_ % 16 != 0) return Next::Broken;
        auto place = tail_ & (capacity_ - 1);
        std::uint32_t length;
        std::memcpy(&length, data() + place, sizeof length);
        if (length == kWrap) {
            if (place == 0 || capacity_ - place >= available) return Next::Broken;  // a frame comes with it
            tail_ += capacity_ - place;
            continue;
        }
        auto bytes = frame_bytes(length);
        if (bytes > capacity_ - place || bytes > available) return Next::Broken;
        std::memcpy(header, data() + place, kHeader);
        header->length = length;  // as checked, whatever the memory says by now
        *payload = ByteView(data() + place + kHeader, length);
        next_ = tail_ + bytes;
        return Next::Frame;
    }
    return Next::Broken;
}

void RingReader::take() {
    tail_ = next_;
    ring_->tail.store(tail_, std::memory_order_release);
}

bool RingReader::writer_waits() {
    // The tail before the flag, see RingWriter::reserve; all four accesses are in the one sequentially consistent order.
    ring_->tail.exchange(tail_, std::memory_order_seq_cst);
    return ring_->wants_room.load(std::memory_order_seq_cst) != 0 &&
           ring_->wants_room.exchange(0, std::memory_order_acq_rel) != 0;
}

}  // namespace ftcomm::shm
