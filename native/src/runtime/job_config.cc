#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "base/failpoint_spec.h"
#include "runtime/job.h"

namespace ftcomm {
namespace {

Status invalid(std::string text) { return Status::error(Code::Invalid, std::move(text)); }

Status seconds(const char* name, double value, Time* out) {
    if (!std::isfinite(value) || value <= 0 || value > 1e9)
        return invalid(std::string(name) + " is " + std::to_string(value) + ": give a positive number of seconds");
    *out = static_cast<Time>(value * 1e9);
    return {};
}

// A size from the environment, with the bounds that the protocol can live with.
Status size_from_environment(const char* name, std::uint64_t least, std::uint64_t most, std::uint64_t* out) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == 0) return {};
    char* end = nullptr;
    errno = 0;
    auto value = std::strtoull(text, &end, 10);
    if (errno != 0 || *end != 0 || *text == '-' || value < least || value > most)
        return invalid(std::string(name) + "=" + text + ": give a number of bytes from " + std::to_string(least) + " to " +
                       std::to_string(most));
    *out = value;
    return {};
}

}  // namespace

Status JobConfig::read(const ft_job_config& from, JobConfig* out) {
    JobConfig c;
    auto text = [](const char* s) { return s != nullptr ? std::string(s) : std::string(); };
    c.job = text(from.job);
    if (c.job.empty() || c.job.size() > 200)
        return invalid("the job's name has " + std::to_string(c.job.size()) + " characters: give one with 1 to 200");
    for (char ch : c.job)
        if (static_cast<unsigned char>(ch) < 0x21 || ch == 0x7f)
            return invalid("the job's name contains a space or a control character");
    c.world_size = from.world_size;
    c.rank = from.rank;
    if (c.world_size < 1 || c.world_size > kMaxRanks)
        return invalid("world size " + std::to_string(c.world_size) + ": from 1 to " + std::to_string(kMaxRanks) +
                       " ranks are supported");
    if (c.rank < 0 || c.rank >= c.world_size)
        return invalid("rank " + std::to_string(c.rank) + " is not below the world size " + std::to_string(c.world_size));
    c.incarnation = from.incarnation;
    if (auto s = seconds("heartbeat", from.heartbeat, &c.heartbeat); !s) return s;
    if (auto s = seconds("timeout", from.timeout, &c.timeout); !s) return s;
    if (c.heartbeat < 10'000'000) return invalid("heartbeat is below 0.01 seconds");

    auto transport = text(from.transport);
    if (transport.empty() || transport == "auto") c.transport = TransportChoice::Auto;
    else if (transport == "shm") c.transport = TransportChoice::Shm;
    else if (transport == "tcp") c.transport = TransportChoice::Tcp;
    else return invalid("transport \"" + transport + "\": one of auto, shm, tcp");
    auto authority = text(from.authority);
    if (authority.empty() || authority == "auto") c.authority = AuthorityChoice::Auto;
    else if (authority == "shm") c.authority = AuthorityChoice::Shm;
    else if (authority == "store") c.authority = AuthorityChoice::Store;
    else return invalid("authority \"" + authority + "\": one of auto, shm, store");
    if (from.store != nullptr) {
        if (from.store->get == nullptr || from.store->compare_set == nullptr) return invalid("the store lacks a function");
        c.has_store = true;
        c.store = *from.store;
    }
    if (c.authority == AuthorityChoice::Store && !c.has_store) return invalid("authority \"store\" without a store");

    if (from.policy < FT_RAISE || from.policy > FT_REPLAY) return invalid("policy is none of raise, lossy, replay");
    c.policy = static_cast<Policy>(from.policy);
    c.interface_ = text(from.interface_);
    c.host = text(from.host);
    c.faults = text(from.faults);
    // All entries are read on every rank, so that one nobody would ever act on is an error and not silence.
    std::vector<fault::Fault> faults;
    if (auto s = fault::parse_faults(c.faults, &faults); !s) return s;
    for (const auto& fault : faults)
        if (fault.rank >= c.world_size)
            return invalid("FTCOMM_FAULTS: rank=" + std::to_string(fault.rank) + ": the job has only " +
                           std::to_string(c.world_size) + " ranks, from 0");
    if (from.log_dir != nullptr && *from.log_dir != 0) {
        c.policy = Policy::Replay;
        c.log.path = from.log_dir;
        if (c.log.path.front() != '/') return invalid("log_dir \"" + c.log.path + "\": give an absolute path");
        c.log.job = from.log_job != nullptr ? text(from.log_job) : c.job;
        c.log.world_size = c.world_size;
        if (from.log_limit > 0) c.log.limit = from.log_limit;
        c.log.spill_path = text(from.log_spill);
        c.log.spill_limit = from.log_spill_limit;
        c.log.durability =
            from.log_durability == 1 ? pairlog::LogConfig::Durability::Host : pairlog::LogConfig::Durability::Process;
        // Of what there may be at once a small part each, as every stream has one that it goes on with.
        c.log.segment_bytes = 1u << 20;
        c.log.grown_bytes = std::min<std::uint64_t>(16u << 20, c.log.limit / 64);
        c.log_remove = from.log_remove != 0;
        c.log_late = from.log_late != 0;
        if (auto s = LogGroups::parse(text(from.log_scope), c.world_size, &c.log_groups); !s) return s;
        c.log.scope = c.log_groups.text;
    }
    for (int r = 0; from.finished != nullptr && r < c.world_size; ++r)
        if (from.finished[r] != 0) c.finished.add(r);
    if (c.finished.has(c.rank)) return invalid("this rank is among those that have finished");
    if (!c.finished.empty() && !c.replays()) return invalid("ranks that have finished before the start need the policy replay");
    if (from.secret != nullptr && from.secret_len > 0) {
        c.has_secret = true;
        const auto* p = reinterpret_cast<const std::byte*>(from.secret);
        c.secret.assign(p, p + from.secret_len);
    }
    if (from.on_event != nullptr)
        c.on_event = [fn = from.on_event, context = from.event_context](const std::string& json) { fn(context, json.c_str()); };

    // The grid and the algorithm come from the world size and this table alone, never from what a rank happens to have.
    auto payload = shm::max_payload(c.world_size);
    c.segment_bytes = std::min<std::uint64_t>(kSegmentBytes, payload);
    c.eager_limit = std::min<std::uint64_t>(65536, payload);
    if (auto s = size_from_environment("FTCOMM_FLAT_LIMIT", 0, 1u << 20, &c.flat_limit); !s) return s;
    if (auto s = size_from_environment("FTCOMM_PULL_LIMIT", 1, 1ull << 40, &c.pull_limit); !s) return s;
    if (auto s = size_from_environment("FTCOMM_REDUCE_PULL_LIMIT", 0, 1ull << 40, &c.reduce_pull_limit); !s) return s;
    std::uint64_t peer_memory = 1;
    if (auto s = size_from_environment("FTCOMM_PEER_MEMORY", 0, 1, &peer_memory); !s) return s;
    c.peer_memory = peer_memory != 0;
    if (auto s = size_from_environment("FTCOMM_SEGMENT_BYTES", 4096, payload, &c.segment_bytes); !s) return s;
    if (auto s = size_from_environment("FTCOMM_EAGER_LIMIT", 0, payload, &c.eager_limit); !s) return s;
    if (auto s = size_from_environment("FTCOMM_STREAM_LIMIT", 0, 1ull << 40, &c.stream_limit); !s) return s;
    if (auto s = size_from_environment("FTCOMM_STAGE_LIMIT", 0, 1ull << 40, &c.stage_limit); !s) return s;
    if (auto s = size_from_environment("FTCOMM_POST_LIMIT", 0, Posts::kMost, &c.post_limit); !s) return s;
    if (auto s = size_from_environment("FTCOMM_SPREAD_DEGREE", 1, kMaxRanks, &c.spread_degree); !s) return s;
    *out = std::move(c);
    return {};
}

}  // namespace ftcomm
