#include "sim/sim_log.h"

#include "sim/world.h"

namespace ftcomm::sim {

SimLog::SimLog(World& world, Instance& self, LogFiles& files)
    : world_(world),
      self_(self),
      memory_(files, self.slot, [&world, &self](int slot) { return world.same_host(slot, self.slot); }) {}

Status SimLog::append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) {
    if (self_.crashed) return {};
    if (!world_.may_send(self_)) {
        world_.counters().add("inject crash before an append");
        return {};
    }
    const bool half = key.dst == self_.slot && !world_.same_host(key.src, self_.slot);  // what it received from another host
    if (key.src != self_.slot && !half) world_.violate("X", "slot %d writes a stream of slot %d", self_.slot, key.src);
    auto status = memory_.append(key, tag, aux, parts);
    LogRecord record;
    if (status && !half && memory_.find(key, memory_.last(key), &record)) world_.checker().logged(key, record);
    if (!world_.may_send(self_)) world_.counters().add("inject crash after an append");
    return status;
}

}  // namespace ftcomm::sim
