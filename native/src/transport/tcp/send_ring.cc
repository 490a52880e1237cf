#include "transport/tcp/send_ring.h"

#include "base/check.h"

namespace ftcomm::tcp {

std::byte* SendRing::reserve(std::size_t size) {
    FT_CHECK(size % 16 == 0 && size > 0, "frame of %zu bytes", size);
    reserved_ = nullptr;
    if (size > capacity_) return nullptr;
    if (memory_ == nullptr) memory_ = std::make_unique_for_overwrite<std::byte[]>(capacity_);
    std::byte* const begin = memory_.get();
    if (frames_.empty()) {
        reserved_ = begin;  // always from the start: a link that keeps up stays in the same, cached memory
    } else {
        const auto tail = static_cast<std::size_t>(frames_.front().data - begin);
        const auto head = static_cast<std::size_t>(frames_.back().data - begin) + frames_.back().size;
        if (frames_.back().data >= frames_.front().data) {  // not wrapped: free are [head, capacity) and [0, tail)
            if (capacity_ - head >= size) {
                reserved_ = begin + head;
            } else if (tail >= size) {
                reserved_ = begin;
            }
        } else if (tail - head >= size) {
            reserved_ = begin + head;
        }
    }
    reserved_size_ = size;
    return reserved_;
}

void SendRing::commit(std::size_t size, const Held& outside) {
    FT_CHECK(reserved_ != nullptr && size <= reserved_size_ && size % 16 == 0, "commit of %zu bytes", size);
    frames_.push_back({reserved_, size, outside, outside.bytes.empty()});
    outside_ += outside.bytes.size();
    reserved_ = nullptr;
}

void SendRing::release_to(std::uint64_t number) {
    while (!frames_.empty() && first_ <= number) {
        outside_ -= frames_.front().outside.bytes.size();
        frames_.pop_front();
        ++first_;
    }
}

SendRing::Frame& SendRing::at(std::uint64_t number) {
    FT_CHECK(number >= first_ && number <= last(), "frame %llu is not kept", static_cast<unsigned long long>(number));
    return frames_[number - first_];
}

}  // namespace ftcomm::tcp
