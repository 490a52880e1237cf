// Ranks of one job in one process on real loopback sockets, each with its own loop and engine lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/unit.h"
#include "transport/tcp/tcp_transport.h"

namespace ftcomm {

namespace rig {

inline constexpr std::uint64_t kBoot = 77;
inline constexpr auto kPatience = std::chrono::seconds(60);  // for a broken implementation only

inline Bytes pattern(std::uint64_t number, std::uint32_t length) {
    Bytes out(length);
    for (std::uint32_t i = 0; i < length; ++i) out[i] = static_cast<std::byte>(number * 13 + i * 5 + (i >> 8));
    return out;
}

// What a node would do: sends numbered frames as there is room, checks those that arrive.
class Rank : public TcpEvents {
public:
    explicit Rank(TcpConfig config) : loop(engine), tcp(config, loop, *this) {
        REQUIRE(loop.start().ok());
        const auto status = tcp.listen();
        if (!EXPECT(status.ok())) unit::failed(__FILE__, __LINE__, status.message);
    }
    ~Rank() override {
        {
            std::lock_guard guard(engine);
            tcp.stop();
        }
        loop.stop();
    }

    void start(const std::vector<Bytes>& peers, std::uint64_t boot = kBoot) {
        std::lock_guard guard(engine);
        const auto status = tcp.start(peers, boot);
        if (!EXPECT(status.ok())) unit::failed(__FILE__, __LINE__, status.message);
    }
    void send(int to, int frames, std::uint32_t length) {
        std::lock_guard guard(engine);
        for (int i = 0; i < frames; ++i) outbox_[to].push_back(length);
        pump(to);
    }
    template <class F>
    bool wait(F condition) {
        std::unique_lock lock(engine);
        return changed.wait_for(lock, kPatience, condition);
    }
    // Until the reason why there is no link to `slot` has `text` in it. It has no event of its own: it is for messages of timeouts.
    bool told(int slot, const char* text) {
        const auto deadline = std::chrono::steady_clock::now() + kPatience;
        std::unique_lock lock(engine);
        while (tcp.why(slot).find(text) == std::string::npos) {
            if (std::chrono::steady_clock::now() > deadline) return false;
            changed.wait_for(lock, std::chrono::milliseconds(1));
        }
        return true;
    }

    void on_frame(int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload) override {
        auto& seen = received[{slot, incarnation}];
        const auto expected = pattern(seen, header.length);
        in_place += payload.data() == place_[0].data() || payload.data() == place_[1].data();
        if (header.seq != seen || !std::equal(expected.begin(), expected.end(), payload.begin(), payload.end())) { wrong = true; }
        ++seen;
        if (cut_every > 0 && seen % cut_every == 0) tcp.cut(slot);
        changed.notify_all();
    }
    std::byte* place(int, std::uint32_t, const FrameHeader& header) override {
        if (!places) return nullptr;
        if (forgets && ++asked_ % 7 == 0) std::swap(place_[0], place_[1]);
        place_[0].resize(std::max<std::size_t>(place_[0].size(), header.length));
        return place_[0].data();
    }
    void on_writable(int slot) override { pump(slot); }
    void on_heard(int, std::uint32_t) override { ++heard; }
    void on_suspicion(int slot, std::uint32_t incarnation, Evidence evidence) override {
        EXPECT_EQ(evidence, Evidence::Reset);
        suspected.emplace_back(slot, incarnation);
        changed.notify_all();
    }
    void on_linked(int, std::uint32_t) override {
        ++linked;
        changed.notify_all();
    }
    void on_idle() override {
        ++idle;
        changed.notify_all();
    }
    void on_log(const std::string& text) override {
        log += text + "\n";
        changed.notify_all();
    }

    std::mutex engine;
    std::condition_variable changed;
    IoLoop loop;
    TcpTransport tcp;
    std::map<std::pair<int, std::uint32_t>, std::uint64_t> received;
    std::vector<std::pair<int, std::uint32_t>> suspected;
    std::string log;
    int linked = 0, heard = 0, idle = 0;
    std::uint64_t cut_every = 0;
    bool wrong = false;
    bool from_outside = false;        // sends long ones from where they lie,
    int released = 0;                 // which are its own again,
    bool places = false;              // has a place for long ones,
    bool forgets = false;             // now and then another one,
    std::uint64_t in_place = 0;       // and they came there

private:
    void pump(int to) {
        auto& box = outbox_[to];
        while (!box.empty()) {
            const auto length = box.front();
            if (from_outside && tcp.sends_from(to, length)) {
                const std::shared_ptr<Bytes> held(new Bytes(pattern(sent_[to], length)), [this](Bytes* memory) {
                    ++released;
                    std::fill(memory->begin(), memory->end(), std::byte{0xee});
                    delete memory;
                });
                FrameHeader header;
                header.length = length;
                header.seq = sent_[to];
                if (!tcp.send_from(to, header, {*held, held})) return;
                ++sent_[to];
                box.pop_front();
                continue;
            }
            auto* at = tcp.reserve(to, length);
            if (at == nullptr) return;
            const auto data = pattern(sent_[to], length);
            if (length > 0) std::memcpy(at, data.data(), length);
            FrameHeader header;
            header.length = length;
            header.seq = sent_[to]++;
            tcp.commit(to, header);
            box.pop_front();
        }
    }
    Bytes place_[2];
    std::uint64_t asked_ = 0;
    std::map<int, std::deque<std::uint32_t>> outbox_;
    std::map<int, std::uint64_t> sent_;
};

inline TcpConfig config(int slot, int world, std::uint32_t incarnation = 0) {
    TcpConfig c;
    c.job = "test";
    c.slot = slot;
    c.world_size = world;
    c.incarnation = incarnation;
    c.host = static_cast<std::uint64_t>(slot) + 1;
    c.ring_bytes = 1u << 20;
    return c;
}

struct Job {
    explicit Job(int n, std::uint32_t incarnation = 0) {
        for (int i = 0; i < n; ++i) ranks.push_back(std::make_unique<Rank>(config(i, n, incarnation)));
        for (auto& r : ranks) blobs.push_back(r->tcp.address());
    }
    void start() {
        for (auto& r : ranks) r->start(blobs);
    }
    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<Bytes> blobs;
};

}  // namespace rig

}  // namespace ftcomm
