// A set of ranks or slots, fixed size so that it is trivially copyable and cheap to compare.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "base/check.h"

namespace ftcomm {

// Another limit is only for the simulator at scale (FTCOMM_SIM_MAX_RANKS): shared memory's layout and the size of sets are made for this.
#ifndef FTCOMM_MAX_RANKS
#define FTCOMM_MAX_RANKS 1024
#endif
inline constexpr int kMaxRanks = FTCOMM_MAX_RANKS;
static_assert(kMaxRanks % 64 == 0 && kMaxRanks / 64 <= 255, "records give a set's words in one byte");

class RankSet {
public:
    static RankSet first(int n) {
        FT_CHECK(n <= kMaxRanks, "%d ranks, at most %d", n, kMaxRanks);
        RankSet s;
        std::size_t i = 0;
        for (; n >= 64; n -= 64) s.words_[i++] = ~std::uint64_t{0};
        if (n > 0) s.words_[i] = bit(n) - 1;
        return s;
    }
    static RankSet only(int r) {
        RankSet s;
        s.add(r);
        return s;
    }
    static RankSet of(const std::vector<int>& ranks) {
        RankSet s;
        for (int r : ranks) s.add(r);
        return s;
    }

    void add(int r) { word(r) |= bit(r); }
    void remove(int r) { word(r) &= ~bit(r); }
    bool has(int r) const { return r >= 0 && r < kMaxRanks && (words_[static_cast<std::size_t>(r) / 64] & bit(r)) != 0; }
    int count() const {
        int n = 0;
        // Nearly all are 0, and without a machine's instruction for it this is a call.
        for (auto w : words_)
            if (w != 0) n += std::popcount(w);
        return n;
    }
    bool empty() const {  // without a branch for each word: most are
        std::uint64_t any = 0;
        for (auto w : words_) any |= w;
        return any == 0;
    }
    // The lowest member, or -1.
    int lowest() const {
        for (std::size_t i = 0; i < words_.size(); ++i)
            if (words_[i] != 0) return static_cast<int>(i * 64) + std::countr_zero(words_[i]);
        return -1;
    }
    std::vector<int> list() const {
        std::vector<int> out;
        out.reserve(static_cast<std::size_t>(count()));
        for (std::size_t i = 0; i < words_.size(); ++i)
            for (auto w = words_[i]; w != 0; w &= w - 1) out.push_back(static_cast<int>(i * 64) + std::countr_zero(w));
        return out;
    }
    bool contains(const RankSet& other) const {
        for (std::size_t i = 0; i < words_.size(); ++i)
            if ((other.words_[i] & ~words_[i]) != 0) return false;
        return true;
    }
    std::string text() const {  // "{0,1,3}"
        std::string s = "{";
        for (int r : list()) {
            if (s.size() > 1) s += ',';
            s += std::to_string(r);
        }
        s += '}';
        return s;
    }

    friend RankSet operator&(RankSet a, const RankSet& b) {
        for (std::size_t i = 0; i < a.words_.size(); ++i) a.words_[i] &= b.words_[i];
        return a;
    }
    friend RankSet operator|(RankSet a, const RankSet& b) {
        for (std::size_t i = 0; i < a.words_.size(); ++i) a.words_[i] |= b.words_[i];
        return a;
    }
    friend RankSet operator-(RankSet a, const RankSet& b) {
        for (std::size_t i = 0; i < a.words_.size(); ++i) a.words_[i] &= ~b.words_[i];
        return a;
    }
    bool operator==(const RankSet& other) const {
        std::uint64_t differ = 0;
        for (std::size_t i = 0; i < words_.size(); ++i) differ |= words_[i] ^ other.words_[i];
        return differ == 0;
    }

    const std::array<std::uint64_t, kMaxRanks / 64>& words() const { return words_; }
    void set_word(std::size_t i, std::uint64_t w) { words_[i] = w; }

private:
    std::uint64_t& word(int r) {
        FT_CHECK(r >= 0 && r < kMaxRanks, "rank %d out of range", r);
        return words_[static_cast<std::size_t>(r) / 64];
    }
    static std::uint64_t bit(int r) { return std::uint64_t{1} << (static_cast<unsigned>(r) % 64); }
    std::array<std::uint64_t, kMaxRanks / 64> words_{};
};

}  // namespace ftcomm
