// Ranks of one host over a segment of their own, without the rest of a process.
#pragma once

#include <linux/futex.h>
#include <sys/stat.h>

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "tests/unit.h"
#include "transport/shm/shm_transport.h"

namespace ftcomm::shm_rig {

struct Events final : ShmEvents {
    std::uint64_t bytes = 0;
    std::vector<std::uint64_t> heard;  // sequence numbers
    std::function<void()> upcall;      // from inside the next frame
    void on_frame(int, std::uint32_t, const FrameHeader& h, ByteView payload) override {
        bytes += payload.size();
        heard.push_back(h.seq);
        if (const auto call = std::exchange(upcall, nullptr)) call();
    }
    std::vector<int> writable;
    void on_writable(int slot) override { writable.push_back(slot); }
    void on_broken(int, std::uint32_t) override {}
};

struct Side {
    Side(shm::Segment& segment, int slot, std::uint32_t incarnation)
        : instance(segment.make_instance(slot, incarnation)), transport(segment, *instance, events) {
        segment.register_instance(instance);
        instance->liveness.store(1234 | FUTEX_WAITERS);
    }
    // Goes round the ring twice, and the other side takes it all.
    void send(int to, Side& target) {
        const auto length = transport.max_payload();
        for (std::uint64_t bytes = 0; bytes < 2 * shm::ring_capacity(2); bytes += length) {
            auto* p = transport.reserve(to, length);
            if (p == nullptr) {
                target.transport.poll(UINT64_MAX);
                p = transport.reserve(to, length);
            }
            std::memset(p, 1, length);
            FrameHeader h{};
            h.length = length;
            transport.commit(to, h);
        }
        target.transport.poll(UINT64_MAX);
    }

    void say(int to, std::uint64_t seq) {
        REQUIRE(transport.reserve(to, 8) != nullptr);
        FrameHeader h{};
        h.length = 8;
        h.seq = seq;
        transport.commit(to, h);
    }

    Events events;
    shm::Instance* instance;
    ShmTransport transport;
};

struct Linked {
    shm::Segment segment;
    Side one, two;
    Linked() : one(created(segment), 0, 0), two(segment, 1, 0) {
        one.transport.attach(1, 0);
        two.transport.attach(0, 0);
    }
    static shm::Segment& created(shm::Segment& segment) {
        REQUIRE(segment.create(1, 2, 2).ok());
        return segment;
    }
};

inline std::int64_t kilobytes(const shm::Segment& segment) {
    struct stat info{};
    ::fstat(segment.fd(), &info);
    return info.st_blocks / 2;
}

}  // namespace ftcomm::shm_rig
