#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tests/unit.h"
#include "transport/shm/ring.h"

namespace ftcomm::shm {
namespace {

constexpr std::uint64_t kCapacity = kMinRing;

struct Memory {
    explicit Memory(std::uint64_t capacity = kCapacity)
        : bytes(static_cast<std::byte*>(::operator new(sizeof(Ring) + capacity, std::align_val_t{4096}))) {
        std::memset(bytes, 0, sizeof(Ring) + capacity);
        ring = reinterpret_cast<Ring*>(bytes);
        ring->capacity = capacity;
    }
    ~Memory() { ::operator delete(bytes, std::align_val_t{4096}); }
    std::byte* bytes;
    Ring* ring;
};

std::byte pattern(std::uint64_t n, std::size_t i) { return static_cast<std::byte>(n * 31 + i); }

bool write(RingWriter& writer, std::uint64_t n, std::uint32_t length) {
    auto* p = writer.reserve(length);
    if (p == nullptr) return false;
    for (std::uint32_t i = 0; i < length; ++i) p[i] = pattern(n, i);
    FrameHeader h;
    h.length = length;
    h.seq = n;
    writer.commit(h);
    return true;
}

bool matches(const FrameHeader& h, ByteView payload, std::uint64_t n) {
    if (h.seq != n || h.length != payload.size() || reinterpret_cast<std::uintptr_t>(payload.data()) % 16 != 0) return false;
    for (std::size_t i = 0; i < payload.size(); ++i)
        if (payload[i] != pattern(n, i)) return false;
    return true;
}

// Of frames of all lengths, runs of short ones among them.
void keeps_order(std::uint64_t capacity, int turns) {
    Memory m(capacity);
    RingWriter writer(m.ring);
    RingReader reader(m.ring, m.ring->capacity);
    const auto longest = std::min(capacity, kUsualRing) / 4;
    std::uint64_t state = 7, in = 0, out = 0;
    auto random = [&] { return state = state * 6364136223846793005ULL + 1442695040888963407ULL, state >> 33; };
    std::vector<std::uint32_t> lengths;
    for (int turn = 0; turn < turns; ++turn) {
        const bool only_short = turn / 1000 % 2 == 1;
        auto length = static_cast<std::uint32_t>(!only_short && random() % 4 == 0 ? random() % (longest + 1) : random() % 100);
        if (random() % 2 == 0) {
            if (write(writer, in, length)) ++in, lengths.push_back(length);
            continue;
        }
        FrameHeader h;
        ByteView payload;
        auto next = reader.peek(&h, &payload);
        REQUIRE(next == (in == out ? RingReader::Next::Empty : RingReader::Next::Frame));
        if (in == out) continue;
        REQUIRE(h.length == lengths[out] && matches(h, payload, out));
        reader.take();
        ++out;
    }
    EXPECT(out > static_cast<std::uint64_t>(turns) / 5);
}

}  // namespace

FT_TEST(shm_ring_keeps_order_over_many_turns) { keeps_order(kCapacity, 50'000); }
FT_TEST(shm_long_ring_keeps_order_over_many_turns) { keeps_order(kLongRing, 50'000); }

namespace {

// Writes one, and takes it: how far into the ring its payload lies.
std::uint64_t place_of_one(RingWriter& writer, RingReader& reader, const Memory& m, std::uint32_t length) {
    REQUIRE(write(writer, 0, length));
    FrameHeader h;
    ByteView payload;
    REQUIRE(reader.peek(&h, &payload) == RingReader::Next::Frame);
    reader.take();
    return static_cast<std::uint64_t>(payload.data() - (m.bytes + sizeof(Ring)));
}

}  // namespace

// The reader's cache has let go of what is written again, and a sender is no further ahead than in a short one.
FT_TEST(shm_long_ring_is_used_to_its_end_and_filled_only_in_part) {
    Memory m(kLongRing);
    RingWriter writer(m.ring);
    RingReader reader(m.ring, m.ring->capacity);
    std::uint64_t furthest = 0;
    for (int n = 0; n < 100; ++n) furthest = std::max(furthest, place_of_one(writer, reader, m, 60'000));
    EXPECT(furthest > kLongRing - 125'000);
    for (int turn = 0; turn < 200; ++turn) {  // wherever it stands, and with an end that is left out among them
        std::uint64_t bytes = 0, n = 0;
        while (write(writer, n, 40'000)) ++n, bytes += 40'000;
        REQUIRE(bytes > kUsualRing - 41'000 && bytes < kUsualRing);
        for (std::uint64_t i = 0; i < n; ++i) {
            FrameHeader h;
            ByteView payload;
            REQUIRE(reader.peek(&h, &payload) == RingReader::Next::Frame && matches(h, payload, i));
            reader.take();
        }
        REQUIRE(reader.writer_waits());
    }
}

FT_TEST(shm_long_ring_of_short_frames_stays_in_its_beginning) {
    Memory m(kLongRing);
    RingWriter writer(m.ring);
    RingReader reader(m.ring, m.ring->capacity);
    for (int turn = 0; turn < 10; ++turn) {
        std::uint64_t place = 0;
        while (place < kUsualRing + 100'000) place = place_of_one(writer, reader, m, 60'000);
        for (int n = 0; n < 63; ++n) {  // one is not yet light traffic
            const auto next = place_of_one(writer, reader, m, 100);
            REQUIRE(next > place);
            place = next;
        }
        for (int n = 0; n < 5'000; ++n) REQUIRE(place_of_one(writer, reader, m, 100) < kUsualRing + 1000);
    }
}

FT_TEST(shm_ring_takes_the_largest_payload_wherever_it_stands) {
    Memory m;
    RingWriter writer(m.ring);
    RingReader reader(m.ring, m.ring->capacity);
    for (std::uint64_t n = 0; n < 3000; ++n) {
        REQUIRE(write(writer, n, n % 2 == 0 ? static_cast<std::uint32_t>(kCapacity / 4) : static_cast<std::uint32_t>(n % 97)));
        FrameHeader h;
        ByteView payload;
        REQUIRE(reader.peek(&h, &payload) == RingReader::Next::Frame);
        REQUIRE(matches(h, payload, n));
        reader.take();
    }
}

FT_TEST(shm_ring_full_tells_the_writer_once) {
    Memory m;
    RingWriter writer(m.ring);
    RingReader reader(m.ring, m.ring->capacity);
    std::uint64_t n = 0;
    while (write(writer, n, 1000)) ++n;
    EXPECT(n > 50);
    FrameHeader h;
    ByteView payload;
    REQUIRE(reader.peek(&h, &payload) == RingReader::Next::Frame);
    reader.take();
    EXPECT(reader.writer_waits());
    EXPECT(!reader.writer_waits());
    EXPECT(write(writer, n, 1000));
}

FT_TEST(shm_ring_between_threads) {
    Memory m;
    constexpr std::uint64_t kFrames = 200'000;
    std::thread sender([&] {
        RingWriter writer(m.ring);
        for (std::uint64_t n = 0; n < kFrames;) {
            if (write(writer, n, static_cast<std::uint32_t>(n * 7 % 300))) ++n;
            else std::this_thread::yield();
        }
    });
    RingReader reader(m.ring, m.ring->capacity);
    bool right = true;
    for (std::uint64_t n = 0; n < kFrames;) {
        FrameHeader h;
        ByteView payload;
        auto next = reader.peek(&h, &payload);
        if (next == RingReader::Next::Empty) {
            std::this_thread::yield();
            continue;
        }
        right &= next == RingReader::Next::Frame && matches(h, payload, n);
        reader.take();
        ++n;
    }
    sender.join();
    EXPECT(right);
}

// Whatever a mad writer leaves there, the reader stays within the ring and comes to an end.
FT_TEST(shm_ring_that_starts_over_without_a_frame_is_broken) {
    Memory m;
    RingWriter writer(m.ring);
    write(writer, 1, 100);
    RingReader reader(m.ring, m.ring->capacity);
    FrameHeader h;
    ByteView payload;
    REQUIRE(reader.peek(&h, &payload) == RingReader::Next::Frame);
    reader.take();
    const auto place = m.ring->head.load();
    std::memcpy(m.bytes + sizeof(Ring) + place, &kWrap, sizeof kWrap);
    m.ring->head.store(kCapacity);
    EXPECT(reader.peek(&h, &payload) == RingReader::Next::Broken);
}

FT_TEST(shm_ring_survives_garbage) {
    for (std::uint64_t seed = 1; seed < 3000; ++seed) {
        Memory m;
        std::uint64_t state = seed;
        auto random = [&] { return state = state * 6364136223846793005ULL + 1442695040888963407ULL, state >> 20; };
        RingWriter writer(m.ring);
        for (std::uint64_t n = 0; n < 20; ++n) write(writer, n, static_cast<std::uint32_t>(random() % 2000));
        for (int i = 0; i < 3; ++i) {
            auto word = static_cast<std::uint32_t>(random() % 3 == 0 ? kWrap : random());
            std::memcpy(m.bytes + sizeof(Ring) + random() % 40'000 / 16 * 16, &word, sizeof word);
        }
        if (random() % 3 == 0) m.ring->head.store(random() % 2 == 0 ? random() : random() % (2 * kCapacity));
        RingReader reader(m.ring, m.ring->capacity);
        FrameHeader h;
        ByteView payload;
        int frames = 0;
        while (reader.peek(&h, &payload) == RingReader::Next::Frame && frames < 100'000) {
            REQUIRE(payload.data() >= m.bytes + sizeof(Ring) &&
                    payload.data() + payload.size() <= m.bytes + sizeof(Ring) + kCapacity);
            reader.take();
            ++frames;
        }
        EXPECT(frames < 100'000);
    }
}

}  // namespace ftcomm::shm
