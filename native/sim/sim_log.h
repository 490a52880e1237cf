// The log of one incarnation: on its host, where it outlives it. A process may die on either side of an append.
#pragma once

#include "sim/memory_log.h"

namespace ftcomm::sim {

class World;
struct Instance;

class SimLog final : public Log {
public:
    SimLog(World& world, Instance& self, LogFiles& files);
    std::uint64_t last(const LogKey& key) override { return memory_.last(key); }
    std::uint64_t first(const LogKey& key) override { return memory_.first(key); }
    Status state(const LogKey& key) override { return memory_.state(key); }
    Status append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) override;
    Status append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                        ByteView piece, std::uint32_t* crc) override;
    std::byte* piece_room(const LogKey& key, std::uint64_t at, std::uint64_t bytes) override {
        return memory_.piece_room(key, at, bytes);
    }
    Held hold(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes) override {
        return memory_.hold(key, seq, at, bytes);
    }
    Status commit_pieces(const LogKey& key) override;
    void abandon_pieces(const LogKey& key) override;
    Status read_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::span<std::byte> to,
                       std::uint32_t* crc) override;
    Status view_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes, View* out) override;
    Status append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                        const Shown& shown) override;
    bool shows_pieces() const override { return true; }
    Status find(const LogKey& key, std::uint64_t seq, LogRecord* out) override { return memory_.find(key, seq, out); }
    Status peek(const LogKey& key, std::uint64_t seq, LogRecord* out) override { return memory_.peek(key, seq, out); }
    Status collect(const LogKey& key, std::uint64_t through) override { return memory_.collect(key, through); }
    bool readable(int slot) override { return memory_.readable(slot); }

private:
    bool maps(const LogKey& key, std::uint64_t seq);
    Status write(const LogKey& key, const std::function<Status()>& append);

    World& world_;
    Instance& self_;
    MemoryLog memory_;
};

}  // namespace ftcomm::sim
