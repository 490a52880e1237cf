// How far each rank of a communicator is in an operation by windows, where the others can see it: a line of memory that each writes
// for itself (M9), and nobody is sent a message who is not waiting for it.
//
// Who has done a step says so here first, and then looks at the others; both are in one order for all (as in Dekker's algorithm), so that of
// those who are through with a step at least the last one sees that all are, and it wakes the others. A rank that waits therefore waits for
// a message that is on its way, or for somebody who is still busy. (A central fence tells one rank, which tells all: two waits.)
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "transport/transport.h"

namespace ftcomm {

class Board {
public:
    // Of the places in a window, used in turn, chunk by chunk: how many there are, and which one is the first chunk's.
    struct Sets {
        std::uint32_t count = 2, first = 0;
    };
    struct Entry {
        std::uint64_t comm = 0, seq = 0, signature = 0;  // of the operation
        std::uint32_t attempt = 0;
        std::uint32_t through = 0;  // the last step that the rank is through with
        std::uint64_t window = 0;  // where it shows something, if it does; its ticket there is the entry's
        std::uint64_t ticket = 0;  // no two entries have the same
        Sets sets;
    };

    // `spare`: lines that no communicator uses, of which this one may be, and to which it goes in the end.
    explicit Board(std::vector<Transport::Window>& spare) : spare_(spare) {}
    ~Board() { give_back(); }
    Board(const Board&) = delete;
    Board& operator=(const Board&) = delete;

    bool open(Transport& memory);  // this rank's line; false: there is no room
    std::uint64_t place() const { return own_.place; }
    void give_back();
    // Who takes part may be others, or other processes, from now on: nobody's is known.
    void forget();
    // Where another rank's line is, from its place. False: out of sight.
    bool learn(Transport& memory, int rank, int slot, std::uint64_t place);
    bool knows(int rank) const {
        const auto at = static_cast<std::size_t>(rank);
        return at < others_.size() && others_[at] != nullptr;
    }

    // All know all others' lines: so it is after an operation that all have told theirs for. The same on all ranks (C8): it begins with what they
    // agree on, and changes with an operation that all have done.
    bool all_known() const { return all_known_; }
    void set_all_known() { all_known_ = true; }
    // One had no room for its line, as all have heard.
    bool lacks_one() const { return lacks_one_; }
    void set_lacks_one() { lacks_one_ = true; }

    void post(const Entry& entry);
    void advance(std::uint32_t through);  // the same entry
    // What a rank whose line is known has posted; nothing: it is changing, or nobody's.
    std::optional<Entry> look(int rank) const;

    // Behind the line, for others to see, too (Posts): this rank's, and another's; null: there is none, or nobody knows where. Zeros at
    // first; a process may have used it for another communicator before.
    static constexpr std::size_t kBehind = 32960;
    std::byte* own_behind() const { return own_.memory != nullptr ? own_.memory + kBehindAt : nullptr; }
    const std::byte* behind(int rank) const {
        return knows(rank) ? others_[static_cast<std::size_t>(rank)] + kBehindAt : nullptr;
    }

private:
    struct Line;
    static constexpr std::size_t kBehindAt = Transport::kWindowHead + 64;
    static constexpr std::size_t kBytes = kBehindAt + kBehind;
    static_assert(kBytes <= Transport::kSmallWindow);
    Line* own() const;

    std::vector<Transport::Window>& spare_;
    Transport::Window own_;
    std::vector<const std::byte*> others_;  // by rank
    bool all_known_ = false;
    bool lacks_one_ = false;
};

}  // namespace ftcomm
