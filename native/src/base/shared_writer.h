// Writing to memory that other cores have read, and read again.
//
// Through the caches is best where the cores share one. Where they do not, each line that another core has is fetched from there first, and
// on AMD's processors that takes six to eight times as long as to write past the caches, which costs the readers a little (a Zen 3: 0.40 and 0.05
// ns a byte; with a shared cache 0.05 and 0.08). Which of the two it is can change while a program runs, as threads, or a guest's
// processors, move. So it is measured.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/copy.h"

namespace ftcomm {

class SharedWriter {
public:
    // measures: else all goes through the caches, as is best on other machines.
    explicit SharedWriter(bool measures) : way_(measures ? Into::Memory : Into::Caches), measures_(measures) {}
    Into way() const { return way_; }
    // As memcpy. Its end is ordered before later stores.
    void copy(void* to, const void* from, std::size_t bytes);

    // How long a copy of so many bytes took: what copy() learns from.
    void took(Into into, std::size_t bytes, std::int64_t ns);
    bool probes();  // whether the next one is to be tried the other way

    static constexpr std::size_t kLeast = 8u << 10;  // bytes: of less the clock says little
    static constexpr int kEvery = 17;  // pieces: so that each of several readers, whose pieces are written in turn, has its turn

private:
    Into way_;
    const bool measures_;
    int since_ = 0, slow_ = 0, quick_ = 0;
    double past_ = 0;  // ns a byte past the caches; 0: not known
};

}  // namespace ftcomm
