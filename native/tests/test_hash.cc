#include <cctype>
#include <string>

#include "base/crc32c.h"
#include "base/crc32c_folding.h"
#include "base/random.h"
#include "base/sha256.h"
#include "tests/unit.h"

namespace ftcomm {

namespace {

Bytes from_hex(const std::string& hex) {
    Bytes out;
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
        out.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    return out;
}

std::string to_hex(ByteView data) {
    std::string out;
    for (auto b : data) {
        out += "0123456789abcdef"[std::to_integer<int>(b) >> 4];
        out += "0123456789abcdef"[std::to_integer<int>(b) & 15];
    }
    return out;
}

Bytes text(const std::string& s) {
    const auto view = std::as_bytes(std::span(s.data(), s.size()));
    return Bytes(view.begin(), view.end());
}

}  // namespace

FT_TEST(sha256_vectors) {  // FIPS 180-4 examples
    EXPECT_EQ(to_hex(sha256(text(""))), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(to_hex(sha256(text("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(to_hex(sha256(text("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(to_hex(sha256(text(std::string(1000000, 'a')))),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

FT_TEST(sha256_in_pieces) {
    Random random(4);
    for (std::size_t size = 0; size < 300; ++size) {
        Bytes data(size);
        for (auto& b : data) b = static_cast<std::byte>(random());
        Sha256 hash;
        for (std::size_t at = 0; at < size;) {
            const std::size_t n = 1 + random.below(size - at);
            hash.update(ByteView(data).subspan(at, n));
            at += n;
        }
        EXPECT(hash.finish() == sha256(data));
    }
}

FT_TEST(hmac_sha256_rfc4231) {
    const auto check = [](const Bytes& key, const Bytes& data, const std::string& expected) {
        EXPECT_EQ(to_hex(hmac_sha256(key, data)).substr(0, expected.size()), expected);
    };
    check(Bytes(20, std::byte{0x0b}), text("Hi There"), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    check(text("Jefe"), text("what do ya want for nothing?"), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    check(Bytes(20, std::byte{0xaa}), Bytes(50, std::byte{0xdd}),
          "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    check(from_hex("0102030405060708090a0b0c0d0e0f10111213141516171819"), Bytes(50, std::byte{0xcd}),
          "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    check(Bytes(20, std::byte{0x0c}), text("Test With Truncation"), "a3b6167473100ee06e0c796c2955552b");
    check(Bytes(131, std::byte{0xaa}), text("Test Using Larger Than Block-Size Key - Hash Key First"),
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    check(Bytes(131, std::byte{0xaa}),
          text("This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
               "hashed before being used by the HMAC algorithm."),
          "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

FT_TEST(constant_time_equal_is_equal) {
    const Bytes a = text("proof"), b = text("proof"), c = text("prooF"), d = text("proo");
    EXPECT(constant_time_equal(a, b));
    EXPECT(!constant_time_equal(a, c));
    EXPECT(!constant_time_equal(a, d));
    EXPECT(constant_time_equal({}, {}));
}

FT_TEST(crc32c_vectors) {  // RFC 3720 B.4 and the usual check value
    const auto both = [](const Bytes& data, std::uint32_t expected) {
        EXPECT_EQ(crc32c(data.data(), data.size()), expected);
        EXPECT_EQ(crc32c_portable(data.data(), data.size()), expected);
    };
    both(text("123456789"), 0xe3069283u);
    both(Bytes(32, std::byte{0}), 0x8a9136aau);
    both(Bytes(32, std::byte{0xff}), 0x62a8ab43u);
    Bytes up(32), down(32);
    for (std::size_t i = 0; i < 32; ++i) up[i] = static_cast<std::byte>(i), down[i] = static_cast<std::byte>(31 - i);
    both(up, 0x46dd794eu);
    both(down, 0x113fdb5cu);
    both({}, 0);
}

// Of which crc32c takes the widest that this machine has.
FT_TEST(crc32c_folded_by_any_width_is_portable) {
    Random random(6);
    Bytes data(20000);
    for (auto& b : data) b = static_cast<std::byte>(random());
    const auto* from = reinterpret_cast<const unsigned char*>(data.data());
    for (int bits : {512, 256}) {
        const auto* folding = crc32c_folding_by(bits);
        for (int i = 0; i < 300 && folding != nullptr; ++i) {
            const std::size_t at = random.below(64), n = 64 * (4 + random.below(300)), to = 64 - at;
            const auto seed = static_cast<std::uint32_t>(random());
            const auto expected = ~crc32c_portable(data.data() + at, n, ~seed);
            EXPECT_EQ(folding->sum(from + at, n, seed), expected);
            Bytes copy(n + 128, std::byte{7});
            EXPECT_EQ(folding->copy(reinterpret_cast<unsigned char*>(copy.data()) + to, from + at, n, seed), expected);
            EXPECT(std::memcmp(copy.data() + to, data.data() + at, n) == 0);
            EXPECT(copy[to - 1] == std::byte{7} && copy[to + n] == std::byte{7});
            Bytes lines(n + 192, std::byte{7});
            auto* line = reinterpret_cast<unsigned char*>(lines.data()) + 64;
            line -= reinterpret_cast<std::uintptr_t>(line) % 64;
            EXPECT_EQ(folding->copy_past_caches(line, from + at, n, seed), expected);
            EXPECT(std::memcmp(line, from + at, n) == 0 && line[-1] == 7 && line[n] == 7);
        }
    }
}

FT_TEST(crc32c_of_two_parts_is_joined) {
    Random random(5);
    Bytes data(200'000);
    for (auto& b : data) b = static_cast<std::byte>(random());
    for (int i = 0; i < 200; ++i) {
        const auto size = i < 100 ? random.below(100) : random.below(data.size() + 1), cut = random.below(size + 1);
        const auto first = crc32c(data.data(), cut), second = crc32c(data.data() + cut, size - cut);
        EXPECT_EQ(crc32c_join(first, second, size - cut), crc32c(data.data(), size));
    }
}

FT_TEST(crc32c_fast_is_portable) {
    Random random(5);
    Bytes data(20000);
    for (auto& b : data) b = static_cast<std::byte>(random());
    for (int i = 0; i < 500; ++i) {
        const std::size_t at = random.below(64), n = random.below(data.size() - 64);
        const auto seed = static_cast<std::uint32_t>(random());
        EXPECT_EQ(crc32c(data.data() + at, n, seed), crc32c_portable(data.data() + at, n, seed));
        for (const auto into : {Into::Caches, Into::Memory})
            for (const auto copier : {crc32c_copy, crc32c_copy_portable}) {
                Bytes copy(n + 128, std::byte{7});
                const auto to = at % 64;
                EXPECT_EQ(copier(copy.data() + to, data.data() + at, n, seed, into), crc32c_portable(data.data() + at, n, seed));
                EXPECT(n == 0 || std::memcmp(copy.data() + to, data.data() + at, n) == 0);
                EXPECT(copy[to + n] == std::byte{7} && (to == 0 || copy[to - 1] == std::byte{7}));
            }
        const std::size_t cut = random.below(n + 1);
        EXPECT_EQ(crc32c(data.data() + at + cut, n - cut, crc32c(data.data() + at, cut, seed)),
                  crc32c(data.data() + at, n, seed));
    }
}

}  // namespace ftcomm
