// Numbers of operations that come in order and mostly in runs: {17..18, 25}.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"

namespace ftcomm {

class SeqRuns {
public:
    // The oldest are forgotten beyond this many runs, so that a vote stays short.
    static constexpr std::size_t kMost = 64;

    void add(std::uint64_t seq) {
        FT_CHECK(runs_.empty() || seq > runs_.back().last, "operation %llu after %llu", static_cast<unsigned long long>(seq),
                 static_cast<unsigned long long>(runs_.back().last));
        if (!runs_.empty() && seq == runs_.back().last + 1) {
            runs_.back().last = seq;
            return;
        }
        if (runs_.size() == kMost) runs_.erase(runs_.begin());
        runs_.push_back({seq, seq});
    }
    bool has(std::uint64_t seq) const {
        for (const auto& r : runs_)
            if (seq >= r.first && seq <= r.last) return true;
        return false;
    }
    bool empty() const { return runs_.empty(); }
    void clear() { runs_.clear(); }

    void encode(ByteWriter& w) const {
        w.put(static_cast<std::uint32_t>(runs_.size()));
        for (const auto& r : runs_) w.put(r.first).put(r.last);
    }
    static SeqRuns decode(ByteReader& r) {
        SeqRuns out;
        out.runs_.resize(r.count(16));
        for (auto& x : out.runs_) {
            x.first = r.get<std::uint64_t>();
            x.last = r.get<std::uint64_t>();
        }
        return out;
    }

private:
    struct Run {
        std::uint64_t first, last;
    };
    std::vector<Run> runs_;
};

}  // namespace ftcomm
