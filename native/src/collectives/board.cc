#include "collectives/board.h"

#include <atomic>
#include <bit>
#include <new>

#include "base/check.h"

namespace ftcomm {

// Read by other processes at any time: whoever finds the same ticket before and after has read one entry. No ticket is 0. (What a process that
// has died had posted stays, and stays true.)
struct Board::Line {
    std::atomic<std::uint64_t> ticket, seq, signature, window;
    std::atomic<std::uint64_t> through;
    std::atomic<std::uint64_t> comm;
    std::atomic<std::uint64_t> attempt;
    std::atomic<std::uint64_t> sets;
};

void Board::give_back() {
    forget();
    if (own_.memory == nullptr) return;
    spare_.push_back(own_);
    own_ = {};
}

Board::Line* Board::own() const { return std::launder(reinterpret_cast<Line*>(own_.memory + Transport::kWindowHead)); }

bool Board::open(Transport& memory) {
    static_assert(sizeof(Line) <= 64 && std::atomic<std::uint64_t>::is_always_lock_free);
    if (own_.memory != nullptr) return true;
    if (spare_.empty()) {
        own_ = memory.make_window(kBytes, Transport::Room::Any);
        if (own_.memory == nullptr) return false;
        new (own_.memory + Transport::kWindowHead) Line();
    } else {
        own_ = spare_.back();
        spare_.pop_back();
    }
    return true;
}

void Board::forget() {
    others_.clear();
    all_known_ = lacks_one_ = false;
    if (own_.memory != nullptr) own()->ticket.store(0, std::memory_order_seq_cst);
}

bool Board::learn(Transport& memory, int rank, int slot, std::uint64_t place) {
    const auto at = static_cast<std::size_t>(rank);
    if (others_.size() <= at) others_.resize(at + 1);
    others_[at] = memory.look(slot, place, kBytes);
    return others_[at] != nullptr;
}

void Board::post(const Entry& entry) {
    FT_CHECK(own_.memory != nullptr && entry.ticket != 0, "nothing to post operation %llu on",
             static_cast<unsigned long long>(entry.seq));
    auto& line = *own();
    line.ticket.store(0, std::memory_order_release);  // each store after those before it, as look() loads them
    line.comm.store(entry.comm, std::memory_order_release);
    line.attempt.store(entry.attempt, std::memory_order_release);
    line.seq.store(entry.seq, std::memory_order_release);
    line.signature.store(entry.signature, std::memory_order_release);
    line.window.store(entry.window, std::memory_order_release);
    line.sets.store(std::bit_cast<std::uint64_t>(entry.sets), std::memory_order_release);
    line.through.store(entry.through, std::memory_order_release);
    line.ticket.store(entry.ticket, std::memory_order_seq_cst);
}

void Board::advance(std::uint32_t through) { own()->through.store(through, std::memory_order_seq_cst); }

std::optional<Board::Entry> Board::look(int rank) const {
    if (!knows(rank)) return std::nullopt;
    const auto& line =
        *std::launder(reinterpret_cast<const Line*>(others_[static_cast<std::size_t>(rank)] + Transport::kWindowHead));
    Entry entry;
    entry.ticket = line.ticket.load(std::memory_order_seq_cst);
    entry.through = static_cast<std::uint32_t>(line.through.load(std::memory_order_seq_cst));
    entry.comm = line.comm.load(std::memory_order_acquire);
    entry.attempt = static_cast<std::uint32_t>(line.attempt.load(std::memory_order_acquire));
    entry.seq = line.seq.load(std::memory_order_acquire);
    entry.signature = line.signature.load(std::memory_order_acquire);
    entry.window = line.window.load(std::memory_order_acquire);
    entry.sets = std::bit_cast<Sets>(line.sets.load(std::memory_order_acquire));
    if (entry.ticket == 0 || line.ticket.load(std::memory_order_acquire) != entry.ticket) return std::nullopt;
    return entry;
}

}  // namespace ftcomm
