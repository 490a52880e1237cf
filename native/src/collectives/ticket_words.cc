#include "collectives/ticket_words.h"

namespace ftcomm {

TicketWords::Word TicketWords::take() {
    constexpr std::size_t kApart = 128;  // what is written to one takes no other one from its readers' caches
    constexpr std::size_t kWords = 32, kBytes = Transport::kWindowHead + kWords * kApart;
    static_assert(kBytes <= Transport::kSmallWindow);
    if (spare_.empty()) {
        const auto window = memory_.make_window(kBytes, Transport::Room::Kept);
        if (window.memory == nullptr) return {};
        made_ += kWords;
        spare_.reserve(made_);  // all may come back, and nothing fails then
        for (auto at = kBytes; at > Transport::kWindowHead; at -= kApart)
            spare_.push_back({reinterpret_cast<std::uint64_t*>(window.memory + at - kApart), window.place + at - kApart});
    }
    const auto word = spare_.back();
    spare_.pop_back();
    return word;
}

}  // namespace ftcomm
