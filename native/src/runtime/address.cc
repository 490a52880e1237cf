#include "runtime/address.h"

#include <algorithm>

namespace ftcomm {
namespace {

constexpr std::uint32_t kMagic = 0x41435446;  // "FTCA"
constexpr std::uint32_t kVersion = 24;

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

const char* to_string(TransportChoice choice) {
    return choice == TransportChoice::Shm ? "shm" : choice == TransportChoice::Tcp ? "tcp" : "auto";
}
const char* to_string(AuthorityChoice choice) {
    return choice == AuthorityChoice::Shm ? "shm" : choice == AuthorityChoice::Store ? "store" : "auto";
}

Bytes Address::encode() const {
    ByteWriter w;
    w.put(kMagic).put(kVersion).put(job).put(world_size).put(rank).put(incarnation).put(host).put(domain);
    w.text(socket).put(nonce).put(processes).put(pid).put(kernel).ranks(processors).put(transport).put(authority);
    w.put(static_cast<std::uint8_t>(has_store)).put(static_cast<std::uint8_t>(has_secret)).put(policy);
    w.put(static_cast<std::uint8_t>(peer_memory)).put(static_cast<std::uint8_t>(streams));
    w.put(heartbeat)
        .put(flat_limit)
        .put(pull_limit)
        .put(reduce_pull_limit)
        .put(segment_bytes)
        .put(eager_limit)
        .put(stream_limit)
        .put(stage_limit)
        .put(post_limit)
        .put(spread_degree);
    w.text(log).bytes(tcp);
    return w.take();
}

Status Address::decode(ByteView blob, Address* out) {
    ByteReader r(blob);
    if (r.get<std::uint32_t>() != kMagic) return Status::error(Code::Invalid, "this is no address of an ftcomm rank");
    auto version = r.get<std::uint32_t>();
    if (version != kVersion)
        return Status::error(Code::Invalid, "the address has version " + std::to_string(version) + ", this library has " +
                                                std::to_string(kVersion) + ": install the same ftcomm on all hosts");
    Address a;
    a.job = r.get<std::uint64_t>();
    a.world_size = r.get<std::int32_t>();
    a.rank = r.get<std::int32_t>();
    a.incarnation = r.get<std::uint32_t>();
    a.host = r.get<std::uint64_t>();
    a.domain = r.get<std::uint64_t>();
    a.socket = r.text();
    a.nonce = r.get<std::uint64_t>();
    a.processes = r.get<std::uint64_t>();
    a.pid = r.get<std::int32_t>();
    a.kernel = r.get<std::uint64_t>();
    a.processors = r.ranks();
    auto transport = r.get<std::uint8_t>();
    auto authority = r.get<std::uint8_t>();
    a.has_store = r.get<std::uint8_t>() != 0;
    a.has_secret = r.get<std::uint8_t>() != 0;
    auto policy = r.get<std::uint8_t>();
    a.peer_memory = r.get<std::uint8_t>() != 0;
    a.streams = r.get<std::uint8_t>() != 0;
    a.heartbeat = r.get<Time>();
    a.flat_limit = r.get<std::uint64_t>();
    a.pull_limit = r.get<std::uint64_t>();
    a.reduce_pull_limit = r.get<std::uint64_t>();
    a.segment_bytes = r.get<std::uint64_t>();
    a.eager_limit = r.get<std::uint64_t>();
    a.stream_limit = r.get<std::uint64_t>();
    a.stage_limit = r.get<std::uint64_t>();
    a.post_limit = r.get<std::uint64_t>();
    a.spread_degree = r.get<std::uint64_t>();
    a.log = r.text();
    auto tcp = r.bytes();
    a.tcp.assign(tcp.begin(), tcp.end());
    if (!r.done() || transport > 2 || authority > 2 || policy > 2 || a.socket.size() > 64)
        return Status::error(Code::Invalid, "the address is damaged");
    a.transport = static_cast<TransportChoice>(transport);
    a.authority = static_cast<AuthorityChoice>(authority);
    a.policy = static_cast<Policy>(policy);
    *out = std::move(a);
    return {};
}

Status Address::check_agrees(const Address& other, int slot) const {
    auto differs = [&](const std::string& what, const std::string& theirs, const std::string& ours) {
        auto s = Status::error(Code::Mismatch, rank_text(slot) + " has " + what + " " + theirs + ", " + rank_text(rank) +
                                                   " has " + ours + ": start all ranks with the same options");
        s.ranks = {slot};
        return s;
    };
    if (other.rank != slot)
        return Status::error(Code::Invalid, "the address given for " + rank_text(slot) + " is that of " + rank_text(other.rank));
    if (other.job != job) return Status::error(Code::Invalid, "the address of " + rank_text(slot) + " is from another job");
    auto number = [](auto n) { return std::to_string(n); };
    if (other.world_size != world_size) return differs("world size", number(other.world_size), number(world_size));
    if (other.transport != transport) return differs("transport", to_string(other.transport), to_string(transport));
    if (other.authority != authority) return differs("authority", to_string(other.authority), to_string(authority));
    if (other.has_store != has_store) return differs("store", other.has_store ? "given" : "missing", has_store ? "one" : "none");
    if (other.has_secret != has_secret)
        return differs("secret", other.has_secret ? "set" : "missing", has_secret ? "one" : "none");
    if (other.policy != policy) return differs("policy", to_string(other.policy), to_string(policy));
    if (policy == Policy::Replay && other.peer_memory != peer_memory)  // it decides on the order of sums
        return differs("FTCOMM_PEER_MEMORY", other.peer_memory ? "1" : "0", peer_memory ? "1" : "0");
    if (other.log != log) return differs("log", other.log, log);
    if (other.heartbeat != heartbeat)
        return differs("heartbeat", number(static_cast<double>(other.heartbeat) / 1e9),
                       number(static_cast<double>(heartbeat) / 1e9));
    if (other.flat_limit != flat_limit) return differs("flat_limit", number(other.flat_limit), number(flat_limit));
    if (other.pull_limit != pull_limit) return differs("pull_limit", number(other.pull_limit), number(pull_limit));
    if (other.reduce_pull_limit != reduce_pull_limit)
        return differs("reduce_pull_limit", number(other.reduce_pull_limit), number(reduce_pull_limit));
    if (other.segment_bytes != segment_bytes) return differs("segment_bytes", number(other.segment_bytes), number(segment_bytes));
    if (other.eager_limit != eager_limit) return differs("eager_limit", number(other.eager_limit), number(eager_limit));
    if (other.stream_limit != stream_limit) return differs("stream_limit", number(other.stream_limit), number(stream_limit));
    if (other.stage_limit != stage_limit) return differs("stage_limit", number(other.stage_limit), number(stage_limit));
    if (other.post_limit != post_limit) return differs("post_limit", number(other.post_limit), number(post_limit));
    if (other.kernel == kernel && other.streams != streams) {
        auto s = Status::error(Code::Mismatch,
                               rank_text(slot) + " and " + rank_text(rank) +
                                   ", on one machine, do not find the same processor there (one is emulated?), and would "
                                   "choose other algorithms: set FTCOMM_STREAM_LIMIT=1099511627776 on all ranks");
        s.ranks = {slot};
        return s;
    }
    if (other.spread_degree != spread_degree) return differs("spread_degree", number(other.spread_degree), number(spread_degree));
    return {};
}

bool has_own_processor(const Address& one, const std::vector<Address>& all) {
    const auto beside = std::count_if(all.begin(), all.end(), [&one](const Address& a) {
        return one.shares_machine(a) && !(a.processors & one.processors).empty();
    });
    return beside <= one.processors.count();
}

bool is_crowded(const std::vector<Address>& all) {
    std::vector<const Address*> seen;  // one of each kind: most ranks of a machine may run on all of its processors
    for (const auto& a : all) {
        if (a.job == 0) continue;  // not known
        if (!seen.empty() && a.host != seen.front()->host) return false;
        const auto alike = [&a](const Address* s) { return s->kernel == a.kernel && s->processors == a.processors; };
        if (std::none_of(seen.begin(), seen.end(), alike)) seen.push_back(&a);
    }
    return std::any_of(seen.begin(), seen.end(), [&](const Address* one) {
        const auto are_too_few = [&](const RankSet& processors) {
            const auto confined = std::count_if(all.begin(), all.end(), [&](const Address& a) {
                return one->shares_machine(a) && (a.processors & processors) == a.processors;
            });
            return confined > processors.count();
        };
        RankSet together;
        for (const auto* s : seen)
            if (one->shares_machine(*s)) together = together | s->processors;
        return are_too_few(one->processors) || are_too_few(together);
    });
}

}  // namespace ftcomm
