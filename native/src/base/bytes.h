// Little-endian, bounds-checked encoding of control records. Both supported architectures are little-endian.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/rank_set.h"

namespace ftcomm {

static_assert(std::endian::native == std::endian::little, "ftcomm's wire format is the native little-endian layout");

using Bytes = std::vector<std::byte>;
using ByteView = std::span<const std::byte>;

class ByteWriter {
public:
    template <class T>
    ByteWriter& put(T value) {
        static_assert(std::is_trivially_copyable_v<T> &&
                      (std::is_integral_v<T> || std::is_enum_v<T> || std::is_floating_point_v<T>));
        append(&value, sizeof(T));
        return *this;
    }
    ByteWriter& bytes(ByteView v) {
        put(static_cast<std::uint32_t>(v.size()));
        return raw(v);
    }
    ByteWriter& raw(ByteView v) {  // up to the end of the record: nothing says how long it is
        append(v.data(), v.size());
        return *this;
    }
    ByteWriter& text(const std::string& s) { return bytes(std::as_bytes(std::span(s.data(), s.size()))); }
    ByteWriter& ranks(const RankSet& set) {
        const auto& words = set.words();
        std::size_t n = words.size();
        while (n > 0 && words[n - 1] == 0) --n;
        put(static_cast<std::uint8_t>(n));
        for (std::size_t i = 0; i < n; ++i) put(words[i]);
        return *this;
    }
    // Valid until something more is written.
    ByteView view() const { return spilled_ ? ByteView(large_) : ByteView(small_).first(used_); }
    Bytes take() {
        if (!spilled_) return Bytes(small_.begin(), small_.begin() + static_cast<std::ptrdiff_t>(used_));
        return std::move(large_);
    }

private:
    void append(const void* data, std::size_t size) {
        if (spilled_ || size > kSmall - used_) {
            append_large(data, size);
            return;
        }
        if (size > 0) std::memcpy(small_.data() + used_, data, size);
        used_ += size;
    }
    // Not inlined: GCC 12 otherwise sees overflows (and stops on them) in growing a vector whose size it knows.
    [[gnu::noinline]] void append_large(const void* data, std::size_t size) {
        if (!spilled_) {
            large_.reserve(used_ + size + kSmall);
            large_.assign(small_.begin(), small_.begin() + static_cast<std::ptrdiff_t>(used_));
            spilled_ = true;
        }
        const auto* p = static_cast<const std::byte*>(data);
        large_.insert(large_.end(), p, p + size);
    }

    static constexpr std::size_t kSmall = 64;  // of what every operation writes: no allocation
    std::array<std::byte, kSmall> small_;
    std::size_t used_ = 0;
    bool spilled_ = false;
    Bytes large_;
};

// Reads past the end turn into ok() == false and zero values: the caller checks once, at the end.
class ByteReader {
public:
    explicit ByteReader(ByteView data) : data_(data) {}

    template <class T>
    T get() {
        static_assert(std::is_trivially_copyable_v<T>);
        T value{};
        if (data_.size() < sizeof(T)) {
            ok_ = false;
            data_ = {};
            return value;
        }
        std::memcpy(&value, data_.data(), sizeof(T));
        data_ = data_.subspan(sizeof(T));
        return value;
    }
    ByteView bytes() {
        auto n = get<std::uint32_t>();
        if (n > data_.size()) {
            ok_ = false;
            return {};
        }
        auto v = data_.first(n);
        data_ = data_.subspan(n);
        return v;
    }
    std::string text() {
        auto v = bytes();
        return std::string(reinterpret_cast<const char*>(v.data()), v.size());
    }
    RankSet ranks() {
        RankSet set;
        auto n = get<std::uint8_t>();
        if (n > set.words().size()) {
            ok_ = false;
            return set;
        }
        for (std::size_t i = 0; i < n; ++i) set.set_word(i, get<std::uint64_t>());
        return set;
    }
    // A count that is about to size a container: bounded by what can still follow at `least` bytes each.
    std::uint32_t count(std::size_t least) {
        auto n = get<std::uint32_t>();
        if (static_cast<std::size_t>(n) * least > data_.size()) {
            ok_ = false;
            return 0;
        }
        return n;
    }
    ByteView left() const { return data_; }
    bool ok() const { return ok_; }
    bool done() const { return ok_ && data_.empty(); }

private:
    ByteView data_;
    bool ok_ = true;
};

inline std::uint64_t hash64(ByteView data, std::uint64_t seed = 0xcbf29ce484222325ULL) {
    // FNV-1a with a final avalanche (splitmix64); used for identifiers and signatures, not for security.
    for (auto b : data) seed = (seed ^ static_cast<std::uint64_t>(b)) * 0x100000001b3ULL;
    seed ^= seed >> 30;
    seed *= 0xbf58476d1ce4e5b9ULL;
    seed ^= seed >> 27;
    seed *= 0x94d049bb133111ebULL;
    return seed ^ (seed >> 31);
}

}  // namespace ftcomm
