// Writing to memory that other cores have read, and read again: links, windows, and the places of what small operations show.
//
// Through the caches is best where the cores share one: what has been written so is read at twice the rate of what was written past them. Where
// they do not share one, each line that another core has is fetched from there first, and on AMD's processors that takes six to eight times as
// long as to write past the caches (ns a byte, a Zen 3: 0.40 and 0.05, with a shared cache 0.05 and 0.08; a Zen 4: 0.40 and 0.03). Which of the
// two it is can change while a program runs, as threads, or a guest's processors, move. So it is measured: into the caches, until a copy is slow;
// then past them for a while, twice as long each time that the next one is slow again. Of a thousand copies one is lost to that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/copy.h"

namespace ftcomm {

class SharedWriter {
public:
    // measures: else all goes through the caches, as is best on other machines.
    // goes_round: also where nothing is measured, in tests.
    explicit SharedWriter(bool measures = true, bool goes_round = false)
        : measures_(measures), goes_round_(measures || goes_round) {}
    Into way() const { return hold_ > 0 ? Into::Memory : Into::Caches; }
    // Of so much. Little goes through the caches in any case.
    Into way(std::size_t bytes) const { return bytes >= kLeast ? way() : Into::Caches; }
    // Whether what is written into the caches had better be where nothing was written for long: near readers have let go of it then
    // (base/streaming.h).
    bool goes_round() const { return goes_round_ && way() == Into::Caches; }
    // As memcpy. Its end is ordered before later stores.
    void copy(void* to, const void* from, std::size_t bytes);

    // That a copy went past the caches, or how long one into them took: what copy() learns from.
    void went_past() { --hold_; }
    void took(std::size_t bytes, std::int64_t ns);

    static constexpr std::size_t kLeast = 4u << 10;  // bytes: of less the clock says little
    // Copies. Slow is, too, what was interrupted or had page faults: the first hold is short.
    static constexpr std::uint32_t kFirstHold = 16, kLongestHold = 1024;

private:
    std::uint32_t hold_ = 0;  // so many still go past the caches
    std::uint32_t next_hold_ = kFirstHold;
    std::size_t quick_ = 0;  // bytes since a copy was slow
    bool measures_, goes_round_;
};

}  // namespace ftcomm
