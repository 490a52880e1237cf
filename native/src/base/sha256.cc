#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ftcomm {

namespace {

constexpr std::array<std::uint32_t, 64> kRound{
    0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
    0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
    0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
    0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
    0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
    0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
    0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
    0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};

std::uint32_t load_big(const std::byte* p) {
    std::uint32_t value;
    std::memcpy(&value, p, sizeof value);
    return __builtin_bswap32(value);
}

void store_big(std::byte* p, std::uint32_t value) {
    value = __builtin_bswap32(value);
    std::memcpy(p, &value, sizeof value);
}

}  // namespace

void Sha256::block(const std::byte* p) {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) w[i] = load_big(p + 4 * i);
    for (std::size_t i = 16; i < 64; ++i) {
        const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
        const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
        const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
        const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
        const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<std::uint32_t, 8> add{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state_[i] += add[i];
}

Sha256& Sha256::update(ByteView data) {
    total_ += data.size();
    while (!data.empty()) {
        if (filled_ == 0 && data.size() >= 64) {
            block(data.data());
            data = data.subspan(64);
            continue;
        }
        const std::size_t n = std::min(data.size(), pending_.size() - filled_);
        std::memcpy(pending_.data() + filled_, data.data(), n);
        filled_ += n;
        data = data.subspan(n);
        if (filled_ == 64) {
            block(pending_.data());
            filled_ = 0;
        }
    }
    return *this;
}

Sha256Digest Sha256::finish() {
    const std::uint64_t bits = total_ * 8;
    pending_[filled_++] = std::byte{0x80};
    if (filled_ > 56) {
        std::fill(pending_.begin() + static_cast<std::ptrdiff_t>(filled_), pending_.end(), std::byte{0});
        block(pending_.data());
        filled_ = 0;
    }
    std::fill(pending_.begin() + static_cast<std::ptrdiff_t>(filled_), pending_.end() - 8, std::byte{0});
    store_big(pending_.data() + 56, static_cast<std::uint32_t>(bits >> 32));
    store_big(pending_.data() + 60, static_cast<std::uint32_t>(bits));
    block(pending_.data());
    Sha256Digest digest;
    for (std::size_t i = 0; i < 8; ++i) store_big(digest.data() + 4 * i, state_[i]);
    return digest;
}

Sha256Digest sha256(ByteView data) { return Sha256().update(data).finish(); }

Sha256Digest hmac_sha256(ByteView key, ByteView message) {
    Sha256Digest hashed;
    if (key.size() > 64) {
        hashed = sha256(key);
        key = hashed;
    }
    std::array<std::byte, 64> inner, outer;
    inner.fill(std::byte{0x36});
    outer.fill(std::byte{0x5c});
    for (std::size_t i = 0; i < key.size(); ++i) {
        inner[i] ^= key[i];
        outer[i] ^= key[i];
    }
    const auto digest = Sha256().update(inner).update(message).finish();
    return Sha256().update(outer).update(digest).finish();
}

bool constant_time_equal(ByteView a, ByteView b) {
    if (a.size() != b.size()) return false;
    // volatile: the compiler must not find out that it may stop early.
    volatile unsigned char difference = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        difference = static_cast<unsigned char>(difference | std::to_integer<unsigned char>(a[i] ^ b[i]));
    return difference == 0;
}

}  // namespace ftcomm
