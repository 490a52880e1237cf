// How ranks become a job. All on the progress thread, so that the thread whose death is evidence exists before anybody
// can count on this rank, and so that a user thread can be interrupted while it waits.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "base/failpoint.h"
#include "runtime/job.h"
#include "runtime/liveness.h"
#include "transport/shm/peer_memory.h"
#include "transport/tcp/descriptors.h"

namespace ftcomm {
namespace {

Status set_once(const ft_store& store, const std::string& key, const Bytes& value) {
    Bytes now(kMaxView);
    auto n = store.compare_set(store.context, key.c_str(), nullptr, 0, reinterpret_cast<const std::uint8_t*>(value.data()),
                               value.size(), reinterpret_cast<std::uint8_t*>(now.data()), now.size());
    if (n == static_cast<std::int64_t>(value.size()) && std::equal(value.begin(), value.end(), now.begin())) return {};
    return Status::error(Code::NoAuthority, "the job's first view could not be written to the store");
}

}  // namespace

void Job::progress_main() {
    LivenessHolder holder;
    liveness_ = &holder;
    auto status = form();
    {
        Engine::Hold hold(engine_);
        // Whatever the wait for a founder that has ended came to, that is the cause.
        if (!status && !start_watch_.gone().empty()) status = start_watch_.failure();
        start_watch_.end();
        formation_ = status;
        formed_ = true;
        if (status) running_.store(true, std::memory_order_release);
        engine_.notify();
    }
    if (status) engine_.run_progress();
    bool left;
    {
        Engine::Hold hold(engine_);
        left = left_ && !never_in_;  // else nobody has heard a goodbye, and the others would still let it in
    }
    holder.release(left ? kLeft : kClosed);
    liveness_ = nullptr;
}

Status Job::form() {
    if (auto s = read_addresses(); !s) return s;
    key_ = HandoffKey::make(config_.secret, job_hash_, boot_);
    RankSet local;
    if (own_.domain != 0)
        for (const auto& a : addresses_)
            if (a.job == job_hash_ && a.domain == own_.domain && !a.socket.empty()) local.add(a.rank);

    FT_POINT("start.link");
    if (!joining_) {
        Engine::Hold hold(engine_);
        start_watch_.begin(loop_, id_, addresses_, [this] {
            stop_forming();
            engine_.notify();
        });
    }
    if (joining_) {
        if (auto s = join_host(); !s) return s;
        if (auto s = choose_authority(local); !s) return s;
        if (auto s = write_first_view(); !s) return s;
        if (auto s = link_tcp(); !s) return s;
    } else {
        bool lowest = config_.rank == this->lowest();
        // Rank 0 writes the first view before anybody can be linked to it; to the others the link says that it is there.
        if (!local.empty() && local.lowest() == config_.rank) {
            if (auto s = give_segment(local); !s) return s;
        } else if (!local.empty()) {
            if (auto s = get_segment(local); !s) return s;
        }
        if (local.empty() || !have_.has(config_.rank)) {
            if (auto s = choose_authority(local); !s) return s;
            if (lowest)
                if (auto s = write_first_view(); !s) return s;
        }
        if (auto s = link_tcp(); !s) return s;
        if (!lowest)
            if (auto s = write_first_view(); !s) return s;
    }
    if (auto s = open_log(); !s) return s;
    return make_node();
}

Status Job::read_addresses() {
    auto n = static_cast<std::size_t>(config_.world_size);
    if (blobs_.size() != n) return Status::error(Code::Invalid, "there must be one address for each rank");
    addresses_.assign(n, {});
    blobs_[static_cast<std::size_t>(config_.rank)] = address_blob_;
    for (std::size_t r = 0; r < n; ++r) {
        if (blobs_[r].empty()) {
            if (joining_ || config_.finished.has(static_cast<int>(r))) continue;
            return Status::error(Code::Invalid, "the address of rank " + std::to_string(r) + " is missing");
        }
        if (auto s = Address::decode(blobs_[r], &addresses_[r]); !s)
            return std::move(s).within("the address of rank " + std::to_string(r));
        if (auto s = own_.check_agrees(addresses_[r], static_cast<int>(r)); !s) return s;
    }
    return {};
}

// Makes this rank's instance in the open segment; afterwards the others can see it live, and die.
Status Job::share_memory(const RankSet& have) {
    self_ = segment_.make_instance(config_.rank, config_.incarnation);
    if (self_ == nullptr) return Status::error(Code::System, "the shared memory segment is full");
    self_->pid = id_.pid;
    self_->pid_namespace = id_.pid_namespace;
    self_->memory_domain =
        config_.peer_memory && config_.transport != TransportChoice::Tcp ? shm::memory_domain(id_.pid_namespace) : 0;
    if (!liveness_->hold(self_->liveness)) say("robust futexes are refused here: deaths are noticed by pidfd and heartbeat");
    if (!segment_.register_instance(self_))
        return Status::error(Code::StaleEpoch,
                             "a newer incarnation of rank " + std::to_string(config_.rank) + " is there already");
    Engine::Hold hold(engine_);
    have_ = have;
    if (config_.transport != TransportChoice::Tcp) shm_ = std::make_unique<ShmTransport>(segment_, *self_, engine_);
    watch_ = std::make_unique<Watch>(segment_, *self_, loop_, engine_);
    return giver_.serve(loop_, key_, segment_.fd(), [this] { return !engine_.has_node() || !engine_.node().stale(); });
}

Status Job::give_segment(const RankSet& local) {
    auto others = local;
    others.remove(config_.rank);
    RankSet have;
    bool held = false;
    auto made = claim_segment(&held);
    if (made)
        made = held ? segment_.create(job_hash_, boot_, config_.world_size)
                    : Status::error(Code::System, "another process has the name of this host's shared memory");
    if (!made) {
        if (config_.transport == TransportChoice::Shm || !tcp_ || (sums_need_memory() && !others.empty())) return made;
        say(made.message + ": this host's ranks use tcp");
        Engine::Hold hold(engine_);
        giver_.close();  // the askers see that nothing comes
        return {};
    }
    if (auto s = giver_.gather(key_, segment_.fd(), others, deadline_, stop_event_, &have); !s) return s;
    have.add(config_.rank);
    if (auto s = share_memory(have); !s) return s;
    if (auto s = choose_authority(local); !s) return s;
    if (config_.rank == lowest())
        if (auto s = write_first_view(); !s) return s;
    Engine::Hold hold(engine_);
    giver_.go(have);
    return {};
}

Status Job::get_segment(const RankSet& local) {
    const auto& giver = addresses_[static_cast<std::size_t>(local.lowest())];
    auto who = "rank " + std::to_string(giver.rank);
    auto status = ask_for_segment(giver.socket, giver.nonce, deadline_);
    if (!status) {
        if (status.code == Code::Closed) return status;
        auto cause = std::move(status).within("shared memory from " + who);
        cause.ranks = {giver.rank};
        if (cause.code == Code::Timeout || needs_memory()) return cause;
        say(cause.message + ": this rank uses tcp");
        RankSet have;  // of no use here; but the giver must not take this rank for dead
        if (asker_.is_open()) asker_.await_go(false, deadline_ + 2 * config_.heartbeat, stop_event_, &have);
        asker_.close();
        return {};
    }
    // Registered before the answer, so that after Go everybody finds everybody.
    if (auto s = share_memory({}); !s) return s;
    RankSet have;
    // The giver knows who is missing and says so when its own time is up, which may be a little after ours.
    status = asker_.await_go(true, deadline_ + 2 * config_.heartbeat, stop_event_, &have);
    if (!status) {
        if (status.ranks.empty() && status.code != Code::Closed) status.ranks = {giver.rank};
        return std::move(status).within("starting with " + who);
    }
    {
        Engine::Hold hold(engine_);
        have_ = have;
    }
    return choose_authority(local);
}

Status Job::choose_authority(const RankSet& local) {
    bool memory;
    if (joining_) {
        memory = segment_.is_open() && segment_.header().authority == shm::kInMemory;
    } else {
        const auto all = config_.world_size - config_.finished.count();
        bool together = local.count() == all && have_.count() == all;
        memory = config_.authority != AuthorityChoice::Store && together;
        if (config_.authority == AuthorityChoice::Shm && !together)
            return Status::error(Code::Invalid, "authority \"shm\" needs all ranks on one host with shared memory: use a store");
        if (!memory && !config_.has_store)
            return Status::error(Code::Invalid,
                                 "ranks that do not all share memory need a store to decide who is alive: give one");
        if (segment_.is_open() && local.lowest() == config_.rank)
            segment_.header().authority = memory ? shm::kInMemory : shm::kInStore;
    }
    Engine::Hold hold(engine_);
    if (memory) {
        cells_ = std::make_unique<ShmAuthority>(segment_);
    } else if (config_.has_store) {
        store_ = std::make_unique<StoreAuthority>(config_.store, config_.job, loop_, [this](CellReply reply) {
            if (engine_.has_node()) engine_.node().on_cell(IoLoop::now(), std::move(reply));
        });
    } else {
        return Status::error(Code::Invalid, "this job's decisions are in a store: a replacement needs it too");
    }
    return {};
}

// From the start on, whatever host a replacement is on: it would not be found in the logs of another group.
std::vector<std::int32_t> Job::groups() const {
    if (!config_.log_groups.inter_host) return config_.log_groups.of;
    std::vector<std::int32_t> out;
    for (const auto& a : addresses_) {
        const auto same = [&](const Address& other) { return a.job != 0 && other.job != 0 && a.host == other.host; };
        const auto first = std::find_if(addresses_.begin(), addresses_.begin() + static_cast<std::ptrdiff_t>(out.size()), same);
        out.push_back(static_cast<std::int32_t>(first - addresses_.begin()));
    }
    return out;
}

// Puts the first view into the cell (rank 0), or finds it there.
Status Job::write_first_view() {
    std::vector<std::uint32_t> incarnations;
    for (const auto& a : addresses_) incarnations.push_back(a.incarnation);
    auto view = Node::make_initial_view(config_.job, boot_, incarnations, config_.finished, groups(), is_crowded(addresses_));
    auto key = Node::view_key(config_.job);
    bool write = config_.rank == lowest() && !joining_;
    Bytes now;
    if (cells_) {
        shm::Cells cells(segment_);
        auto result = write ? cells.compare_and_set(key, {}, view, &now) : cells.read(key, &now);
        if (result == shm::Cells::Result::Lost || now.empty())
            return Status::error(Code::NoAuthority, "the shared memory segment is damaged");
    } else {
        if (auto s = write ? StoreAuthority::write_boot(config_.store, config_.job, boot_)
                           : StoreAuthority::check_boot(config_.store, config_.job, boot_);
            !s)
            return s;
        if (write) {
            if (auto s = set_once(config_.store, key, view); !s) return s;
        }
        if (joining_)
            if (auto s = read_view(&now); !s) return s;
    }
    first_view_ = joining_ ? now : view;
    return {};
}

Status Job::link_tcp() {
    std::vector<Bytes> peers(static_cast<std::size_t>(config_.world_size));
    RankSet needed;
    for (const auto& a : addresses_) {
        if (a.job != job_hash_ || a.rank == config_.rank || (shm_ && have_.has(a.rank))) continue;
        auto slot = static_cast<std::size_t>(a.rank);
        if (!tcp_ || a.tcp.empty()) {
            if (joining_) continue;
            const auto whose = std::to_string(tcp_ ? a.rank : config_.rank);
            auto s = Status::error(Code::Unsupported, "rank " + std::to_string(a.rank) + " shares no memory with rank " +
                                                          std::to_string(config_.rank) + ", and rank " + whose + " has no tcp" +
                                                          (no_tcp_.empty() ? ": see its output for the reason" : ": " + no_tcp_));
            s.ranks = {a.rank};
            return s;
        }
        peers[slot] = a.tcp;
        needed.add(a.rank);
    }
    if (auto s = make_room_for(static_cast<std::size_t>(needed.count())); !s) return s;
    engine_.lock();
    Status status;
    if (tcp_) status = tcp_->start(peers, boot_);
    while (status && !joining_) {
        auto missing = tcp_ ? tcp_->unlinked() & needed : RankSet{};
        if (missing.empty()) break;
        if (!(start_watch_.gone() & missing).empty()) {
            status = start_watch_.failure();
            break;
        }
        auto seen = engine_.changes();
        engine_.unlock();
        auto result = engine_.wait_change(seen, deadline_);
        engine_.lock();
        if (result == Engine::Wait::Closed) status = Status::error(Code::Closed, "the job was closed while it started");
        if (result != Engine::Wait::Timeout) continue;
        auto why = tcp_->why(missing.lowest());
        const bool far =
            std::ranges::any_of(addresses_, [&](const Address& a) { return missing.has(a.rank) && a.host != own_.host; });
        const char* unless = far && !config_.has_secret
                                 ? ". This job has no secret, so its ranks listen on loopback only: between "
                                   "hosts set FTCOMM_SECRET to the same 16 or more characters on all ranks"
                                 : "";
        status = Status::error(Code::Timeout, "no link to rank(s) " + missing.text() + (why.empty() ? "" : " (" + why + ")") +
                                                  ": see whether they are running and reachable" + unless);
        status.ranks = missing.list();
    }
    engine_.unlock();
    return status;
}

// Where a slot's earlier processes have logged what this one will do again.
Status Job::open_log() {
    if (!config_.replays()) return {};
    FileLogConfig c;
    c.files = config_.log;
    // Hosts that share the folder, or are pretended (option host), keep their halves apart. A log that survives a boot is found after it.
    const auto own = log_owner(id_, c.files.durability == pairlog::LogConfig::Durability::Host);
    char host[24];
    std::snprintf(host, sizeof host, "/%016llx", static_cast<unsigned long long>(own));
    // Without a launcher, which gives each run a folder of its own: another run of this name has had another nonce.
    if (config_.log_remove) std::snprintf(host, sizeof host, "/%016llx", static_cast<unsigned long long>(own ^ boot_));
    if (!c.files.spill_path.empty()) c.files.spill_path += "/" + std::filesystem::path(c.files.path).filename().string() + host;
    c.files.path += host;
    c.remove_old = config_.log_remove && config_.incarnation == 0;
    c.keep = !config_.log_remove;
    c.slot = config_.rank;
    c.again = config_.incarnation > 0;
    c.unlogged = unlogged_;
    c.deadline = deadline_;
    c.stop_event = stop_event_;
    for (const auto& a : addresses_) c.hosts.push_back(a.job != 0 ? a.host : 0);
    std::unique_ptr<FileLog> log;
    if (auto s = FileLog::open(c, &log); !s) return s;
    Engine::Hold hold(engine_);
    log_ = std::move(log);
    return {};
}

Status Job::make_node() {
    NodeConfig c;
    c.log = log_.get();
    c.log_late = config_.log_late;
    c.again = config_.replays() && config_.incarnation > 0;
    c.job = config_.job;
    c.slot = config_.rank;
    c.incarnation = config_.incarnation;
    c.world_size = config_.world_size;
    c.joining = joining_;
    c.boot = boot_;
    c.seed = random64();
    c.heartbeat = config_.heartbeat;
    c.timeout = config_.timeout;
    for (std::size_t slot = 0; slot < addresses_.size(); ++slot)
        c.hosts.push_back(addresses_[slot].job != 0 ? addresses_[slot].host : slot + 1);  // not known: a host of its own
    c.flat_limit = config_.flat_limit;
    c.pull_limit = config_.pull_limit;
    c.reduce_pull_limit = config_.reduce_pull_limit;
    c.stage_limit = config_.stage_limit;
    c.post_limit = config_.post_limit;
    c.segment_bytes = config_.segment_bytes;
    c.eager_limit = config_.eager_limit;
    c.spread_degree = static_cast<int>(config_.spread_degree);
    c.initial_view = first_view_;

    Engine::Hold hold(engine_);
    transport_ = std::make_unique<RuntimeTransport>(config_.world_size, &segment_, shm_.get(), tcp_.get());
    for (const auto& a : addresses_)
        if (a.job == job_hash_ && a.rank != config_.rank) transport_->attach(a.rank, a.incarnation);
    Engine::Parts parts;
    parts.segment = segment_.is_open() ? &segment_ : nullptr;
    parts.self = self_;
    parts.shm = shm_.get();
    parts.tcp = tcp_.get();
    parts.cells = cells_.get();
    parts.watch = watch_.get();
    parts.sockets = tcp_ ? &loop_ : nullptr;
    parts.own_processor = c.own_processor = has_own_processor(own_, addresses_);
    c.stream_limit = config_.links_stream_from(c.own_processor);
    // A short link's lines are still in the reader's cache when they are written again: past the caches is faster then, wherever that one is.
    c.paces_streams = c.streams() && config_.stream_limit == 0 && shm::ring_capacity(config_.world_size) > shm::kUsualRing;
    c.pushes = c.paces_streams && c.own_processor && config_.pull_limit == 0;
    engine_.set_parts(parts);
    if (store_) store_->start();
    Authority& authority = cells_ ? static_cast<Authority&>(*cells_) : *store_;
    engine_.set_node(std::make_unique<Node>(std::move(c), *transport_, authority, engine_, IoLoop::now()));
    return {};
}

}  // namespace ftcomm
