#include "collectives/ticket_words.h"

namespace ftcomm {

TicketWords::Word TicketWords::take(Transport& memory) {
    constexpr std::size_t kApart = 128;  // what is written to one takes no other one from its readers' caches
    constexpr std::size_t kBytes = Transport::kWindowHead + 32 * kApart;
    static_assert(kBytes <= Transport::kSmallWindow);
    if (spare_.empty()) {
        const auto window = memory.make_window(kBytes, Transport::Room::Kept);
        if (window.memory == nullptr) return {};
        made_ += kBytes / kApart;
        spare_.reserve(made_);  // all may come back, and nothing fails then
        for (auto at = kBytes; at > Transport::kWindowHead; at -= kApart)
            spare_.push_back({reinterpret_cast<std::uint64_t*>(window.memory + at - kApart), window.place + at - kApart});
    }
    const auto word = spare_.back();
    spare_.pop_back();
    return word;
}

}  // namespace ftcomm
