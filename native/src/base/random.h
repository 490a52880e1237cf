// Random numbers: a seeded generator for simulation and jitter, and the system's for identifiers and nonces.
#pragma once

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace ftcomm {

// One step of splitmix64; also a good mixer of a counter.
inline std::uint64_t splitmix64(std::uint64_t& state) {
    std::uint64_t z = (state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

// xoshiro256**: the same sequence for the same seed everywhere. Meets UniformRandomBitGenerator, but std's distributions
// differ between libraries: use below() and uniform() where runs must repeat.
class Random {
public:
    using result_type = std::uint64_t;

    explicit Random(std::uint64_t seed) {
        for (auto& word : state_) word = splitmix64(seed);
    }

    std::uint64_t operator()() {
        const std::uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
        const std::uint64_t t = state_[1] << 17;
        state_[2] ^= state_[0];
        state_[3] ^= state_[1];
        state_[1] ^= state_[2];
        state_[0] ^= state_[3];
        state_[2] ^= t;
        state_[3] = std::rotl(state_[3], 45);
        return result;
    }
    static constexpr std::uint64_t min() { return 0; }
    static constexpr std::uint64_t max() { return std::numeric_limits<std::uint64_t>::max(); }

    // 0 to n - 1, each as likely: values from the incomplete last round of n are drawn again.
    std::uint64_t below(std::uint64_t n) {
        FT_CHECK(n > 0, "a random number below 0");
        const std::uint64_t skip = (0 - n) % n;
        for (;;)
            if (const std::uint64_t x = (*this)(); x >= skip) return x % n;
    }
    std::int64_t between(std::int64_t low, std::int64_t high) {  // both included
        const std::uint64_t span = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) + 1;
        const std::uint64_t offset = span == 0 ? (*this)() : below(span);
        return static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + offset);
    }
    double uniform() { return static_cast<double>((*this)() >> 11) * 0x1p-53; }  // [0, 1)
    bool chance(double p) { return uniform() < p; }

private:
    std::uint64_t state_[4];
};

// Fills from the kernel's generator: identifiers and nonces that nobody can guess.
inline void os_random(void* out, std::size_t size) {
    auto* p = static_cast<unsigned char*>(out);
    while (size > 0) {
        const ssize_t n = getrandom(p, size, 0);
        if (n < 0 && errno == EINTR) continue;
        FT_CHECK(n > 0, "getrandom: %s", std::strerror(errno));
        p += n;
        size -= static_cast<std::size_t>(n);
    }
}

inline std::uint64_t os_random64() {
    std::uint64_t value;
    os_random(&value, sizeof value);
    return value;
}

}  // namespace ftcomm
