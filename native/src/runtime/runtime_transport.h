// Each slot by the wire that reaches it: shared memory on this host, tcp elsewhere.
#pragma once

#include <vector>

#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace ftcomm {

class RuntimeTransport final : public Transport {
public:
    // Either may be nullptr, not both unless the job has one rank.
    RuntimeTransport(int world_size, shm::Segment* segment, ShmTransport* shm, TcpTransport* tcp)
        : segment_(segment),
          shm_(shm),
          tcp_(tcp),
          by_shm_(static_cast<std::size_t>(world_size)),
          max_payload_(shm::max_payload(world_size)) {}

    std::byte* reserve(int slot, std::uint32_t length) override {
        auto* wire = of(slot);
        return wire != nullptr ? wire->reserve(slot, length) : nullptr;
    }
    void commit(int slot, const FrameHeader& header) override { of(slot)->commit(slot, header); }
    bool sends_from(int slot, std::size_t bytes) override {
        auto* wire = of(slot);
        return wire != nullptr && wire->sends_from(slot, bytes);
    }
    bool send_from(int slot, const FrameHeader& header, const Held& payload) override {
        return of(slot)->send_from(slot, header, payload);
    }
    void take_back(int slot, std::uint64_t comm, bool has_come) override {
        if (tcp_ != nullptr) tcp_->take_back(slot, comm, has_come);
    }
    void attach(int slot, std::uint32_t incarnation) override {
        // A rank registers before it sends its first frame, so an unknown one is on another host.
        bool local = shm_ != nullptr && (tcp_ == nullptr || segment_->find_instance(slot, incarnation) != nullptr);
        by_shm_[static_cast<std::size_t>(slot)] = local;
        // Each wire notes it, also where it does not reach: what detach() closes is then never a newer incarnation's link, which is
        // there before its predecessor is out of the view.
        if (shm_ != nullptr) shm_->attach(slot, incarnation);
        if (tcp_ != nullptr) tcp_->attach(slot, incarnation);
    }
    void detach(int slot) override {
        if (shm_ != nullptr) shm_->detach(slot);
        if (tcp_ != nullptr) tcp_->detach(slot);
    }
    void drain(int slot) override {
        if (auto* wire = of(slot)) wire->drain(slot);
    }
    bool shares_memory(int slot) override { return is_shm(slot) && shm_->shares_memory(slot); }
    bool is_near(int slot) override { return is_shm(slot); }
    Read read(int slot, const Remote& remote, std::byte* to, std::size_t bytes) override {
        return shm_->read(slot, remote, to, bytes);
    }
    Window make_window(std::size_t bytes, Room room) override {
        return shm_ != nullptr ? shm_->make_window(bytes, room) : Window{};
    }
    const std::byte* look(int slot, std::uint64_t place, std::size_t bytes) override {
        return is_shm(slot) ? shm_->look(slot, place, bytes) : nullptr;
    }
    void watch_words(std::span<const Word> words) override {
        if (shm_ != nullptr) shm_->watch_words(words);
    }
    void nudge(int slot) override {
        if (is_shm(slot)) shm_->nudge(slot);
    }
    // The same on all ranks, whatever wires they have.
    std::uint32_t max_payload() const override { return max_payload_; }

    bool is_shm(int slot) const { return by_shm_[static_cast<std::size_t>(slot)]; }

private:
    Transport* of(int slot) const { return is_shm(slot) ? static_cast<Transport*>(shm_) : tcp_; }

    shm::Segment* segment_;
    ShmTransport* shm_;
    TcpTransport* tcp_;
    std::vector<bool> by_shm_;
    const std::uint32_t max_payload_;  // asked for by every operation
};

}  // namespace ftcomm
