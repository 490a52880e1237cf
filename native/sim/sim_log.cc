#include "sim/sim_log.h"

#include "sim/world.h"

namespace ftcomm::sim {

SimLog::SimLog(World& world, Instance& self, LogFiles& files)
    : world_(world),
      self_(self),
      memory_(files, self.slot, [&world, &self](int slot) { return world.same_host(slot, self.slot); }) {
    memory_.recover();
}

Status SimLog::append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) {
    return write(key, [&] { return memory_.append(key, tag, aux, parts); });
}

Status SimLog::append_piece(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, std::uint64_t at,
                            ByteView piece, std::uint32_t* crc) {
    *crc = 0;
    if (at == 0 && key.dst == kResults) world_.counters().add("result logged as it becomes final");
    if (self_.crashed) return {};
    if (at > 0 && !world_.may_send(self_)) {
        world_.counters().add("inject crash in a record");
        return {};
    }
    return memory_.append_piece(key, tag, aux, bytes, at, piece, crc);
}

// Now and then there is no memory to map it; without a draw, so that those of a seed stay as they were.
bool SimLog::maps(const LogKey& key, std::uint64_t seq) {
    const bool maps = (seq * 7 + static_cast<std::uint64_t>(self_.slot * 3 + key.src)) % 13 != 0;
    if (!maps) world_.counters().add("a record in the making cannot be read");
    return maps;
}

Status SimLog::read_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::span<std::byte> to, std::uint32_t* crc) {
    return maps(key, seq) ? memory_.read_pieces(key, seq, at, to, crc) : Status::error(Code::System, "it cannot be mapped");
}

Status SimLog::view_pieces(const LogKey& key, std::uint64_t seq, std::uint64_t at, std::uint64_t bytes, View* out) {
    return maps(key, seq) ? memory_.view_pieces(key, seq, at, bytes, out) : Status::error(Code::System, "it cannot be mapped");
}

Status SimLog::append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                            const Shown& shown) {
    if (self_.crashed) return {};
    world_.counters().add("message shown while it is logged");
    return Log::append_shown(key, tag, aux, payload, stretch, shown);  // may die in each piece, or as it shows one
}

Status SimLog::commit_pieces(const LogKey& key) {
    return write(key, [&] { return memory_.commit_pieces(key); });
}

void SimLog::abandon_pieces(const LogKey& key) {
    if (!self_.crashed) memory_.abandon_pieces(key);
}

Status SimLog::write(const LogKey& key, const std::function<Status()>& append) {
    if (self_.crashed) return {};
    if (!world_.may_send(self_)) {
        world_.counters().add("inject crash before an append");
        return {};
    }
    const bool half = key.dst == self_.slot && !world_.same_host(key.src, self_.slot);  // what it received from another host
    if (key.src != self_.slot && !half) world_.violate("X", "slot %d writes a stream of slot %d", self_.slot, key.src);
    auto status = append();
    LogRecord record;
    if (status && !half && memory_.find(key, memory_.last(key), &record)) world_.checker().logged(key, record);
    if (!world_.may_send(self_)) world_.counters().add("inject crash after an append");
    return status;
}

}  // namespace ftcomm::sim
