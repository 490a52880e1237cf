// The only source of randomness of a simulated run: everything in a seed follows from it.
#pragma once

#include <cstdint>
#include <vector>

namespace ftcomm::sim {

class Random {
public:
    // The seed is mixed first: the streams of neighbouring seeds would otherwise be one stream, shifted.
    explicit Random(std::uint64_t seed) : state_(seed) { state_ = next() ^ 0x632be59bd9b4e019ULL; }

    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        return z ^ (z >> 31);
    }
    // 0 .. n-1; 0 for n == 0.
    std::uint64_t below(std::uint64_t n) { return n == 0 ? 0 : next() % n; }
    std::int64_t between(std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low + 1)));
    }
    int index(std::size_t n) { return static_cast<int>(below(n)); }
    bool chance(double p) { return static_cast<double>(next() >> 11) * 0x1.0p-53 < p; }
    template <class T>
    const T& pick(const std::vector<T>& from) {
        return from[below(from.size())];
    }

private:
    std::uint64_t state_;
};

}  // namespace ftcomm::sim
