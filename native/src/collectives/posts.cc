#include "collectives/posts.h"

#include <cstddef>
#include <new>

#include "base/check.h"
#include "base/copy.h"

namespace ftcomm {

namespace {

// Read by other processes at any time: who finds the same stamp before and after has read one input; what is torn is thrown away. The first bytes of an input
// are in the line of the stamp.
struct Place {
    std::atomic<std::uint64_t> stamp;  // 0: it is being written, or nobody has
    std::atomic<std::uint64_t> comm, seq, signature;
    std::atomic<std::uint32_t> attempt, bytes;
    std::byte input[Posts::kMost];
    std::byte rest[24];  // of its last line, as the board begins at one
};
struct Window {
    std::uint64_t stamps;  // that its owner has used, whatever the communicator
    std::byte rest[56];  // of the line
    Place places[2];
};
static_assert(sizeof(Place) % 64 == 0 && offsetof(Place, input) == 40 && sizeof(Window) == Board::kBehind);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// Into a place, or out of one that may be written meanwhile. Between processes there is nothing that a compiler could make of it; where both are
// threads of one test, thread sanitizer is shown bytes.
template <class Copy>
void copy_shared(std::byte* to, const std::byte* from, std::size_t bytes, [[maybe_unused]] Copy copy) {
#if defined(__SANITIZE_THREAD__)
    for (std::size_t i = 0; i < bytes; ++i) {
        const auto byte = std::atomic_ref<std::byte>(const_cast<std::byte&>(from[i])).load(std::memory_order_relaxed);  // NOLINT
        std::atomic_ref<std::byte>(to[i]).store(byte, std::memory_order_relaxed);
    }
#else
    copy(to, from, bytes);
#endif
}

const Place& place_of(const std::byte* behind, std::uint64_t seq) {
    return std::launder(reinterpret_cast<const Window*>(behind))->places[seq % 2];
}

}  // namespace

void Posts::put(const Key& key, ByteView input) {
    auto* behind = board_.own_behind();
    FT_CHECK(behind != nullptr && input.size() <= kMost, "nowhere to put %zu bytes", input.size());
    auto& window = *std::launder(reinterpret_cast<Window*>(behind));
    auto& place = window.places[key.seq % 2];
    place.stamp.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // before what follows, as look() reads it
    place.comm.store(key.comm, std::memory_order_relaxed);
    place.seq.store(key.seq, std::memory_order_relaxed);
    place.signature.store(key.signature, std::memory_order_relaxed);
    place.attempt.store(key.attempt, std::memory_order_relaxed);
    place.bytes.store(static_cast<std::uint32_t>(input.size()), std::memory_order_relaxed);
    if (writer_.way() == Into::Memory)
        std::atomic_thread_fence(std::memory_order_seq_cst);  // which orders stores past the caches, too
    copy_shared(place.input, input.data(), input.size(), [&](auto... what) { writer_.copy(what...); });
    // In one order for all with what the others look at before they sleep, and with the looks of who puts something in: the last one sees all.
    place.stamp.store(++window.stamps, std::memory_order_seq_cst);
}

std::optional<Posts::Last> Posts::last(std::uint64_t comm) const {
    const auto* behind = board_.own_behind();
    if (behind == nullptr) return std::nullopt;
    const auto &a = place_of(behind, 0), &b = place_of(behind, 1);
    const auto& newest = a.stamp.load(std::memory_order_relaxed) > b.stamp.load(std::memory_order_relaxed) ? a : b;
    Last last{{newest.comm, newest.seq, newest.signature, newest.attempt}, {newest.input, newest.bytes}};
    if (newest.stamp.load(std::memory_order_relaxed) == 0 || last.key.comm != comm) return std::nullopt;
    return last;
}

Posts::Found Posts::look(int rank, const Key& key, Bytes& room, ByteView* input) {
    const auto* behind = board_.behind(rank);
    if (behind == nullptr) return Found::Nothing;
    const auto& place = place_of(behind, key.seq);
    if (seen_.size() <= static_cast<std::size_t>(rank)) seen_.resize(static_cast<std::size_t>(rank) + 1);
    const auto stamp = place.stamp.load(std::memory_order_seq_cst);
    seen_[static_cast<std::size_t>(rank)] = stamp;  // before the rest: whatever comes after this is news
    if (stamp == 0 || place.comm.load(std::memory_order_relaxed) != key.comm ||
        place.seq.load(std::memory_order_relaxed) != key.seq || place.attempt.load(std::memory_order_relaxed) != key.attempt)
        return Found::Nothing;
    const auto signature = place.signature.load(std::memory_order_relaxed);
    const auto bytes = place.bytes.load(std::memory_order_relaxed);
    if (bytes > kMost) return Found::Nothing;
    if (room.size() < kMost) room.resize(kMost);
    copy_shared(room.data(), place.input, bytes, copy_bytes);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (place.stamp.load(std::memory_order_relaxed) != stamp) return Found::Nothing;
    if (signature != key.signature) return Found::Other;
    *input = ByteView(room.data(), bytes);
    return Found::Input;
}

Transport::Word Posts::word(int rank, std::uint64_t seq) const {
    return {&place_of(board_.behind(rank), seq).stamp, seen_[static_cast<std::size_t>(rank)]};
}

}  // namespace ftcomm
