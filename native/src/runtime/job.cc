#include "runtime/job.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/failpoint.h"
#include "runtime/event_json.h"
#include "runtime/json.h"
#include "runtime/liveness.h"
#include "runtime/thread.h"

namespace ftcomm {

Job::Job(JobConfig config)
    : config_(std::move(config)),
      job_hash_(hash64(std::as_bytes(std::span(config_.job.data(), config_.job.size())))),
      id_(find_host(config_.host)),
      engine_(dispatcher_,
              [this](const NodeEvent* event, const std::string& line) {
                  if (!config_.on_event) return;
                  if (!tells_all_ && (event == nullptr || event->kind != NodeEvent::Kind::Stale)) return;
                  // Stamped here, where it happened, not where it is delivered.
                  auto json = event_json({config_.job, config_.rank, config_.incarnation}, event, line);
                  auto tell = [this, json = std::move(json)] { config_.on_event(json); };
                  // A launcher takes a replacement for one that nobody can let in any more until it hears otherwise.
                  const bool came_in = event != nullptr && event->kind == NodeEvent::Kind::Joined && event->slot == config_.rank;
                  if (came_in) dispatcher_.post(std::move(tell));
                  else dispatcher_.post_soon(std::move(tell));
              }),
      loop_([this] { engine_.lock_urgently(); }, [this] { engine_.unlock(); }) {}

Job::~Job() { close(); }

Status Job::prepare() {
    if (auto s = fault::configure(config_.faults, config_.rank, static_cast<int>(config_.incarnation)); !s) return s;
    fork_guard::add(this);
    if (auto s = dispatcher_.start(); !s) return s;
    if (auto s = loop_.start(); !s) return s;
    stop_event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (stop_event_ < 0) return Status::error(Code::System, std::string("eventfd: ") + std::strerror(errno));

    Engine::Hold hold(engine_);
    own_.job = job_hash_;
    own_.world_size = config_.world_size;
    own_.rank = config_.rank;
    own_.incarnation = config_.incarnation;
    own_.host = id_.host;
    own_.processes = id_.processes;
    own_.pid = id_.pid;
    own_.kernel = id_.kernel;
    own_.processors = id_.processors;
    own_.transport = config_.transport;
    own_.authority = config_.authority;
    own_.has_store = config_.has_store;
    own_.has_secret = config_.has_secret;
    own_.policy = config_.policy;
    own_.peer_memory = config_.peer_memory;
    own_.log = config_.log_groups.text;
    own_.heartbeat = config_.heartbeat;
    own_.flat_limit = config_.flat_limit;
    own_.pull_limit = config_.pull_limit;
    own_.reduce_pull_limit = config_.reduce_pull_limit;
    own_.stream_limit = config_.stream_limit;
    own_.stage_limit = config_.stage_limit;
    own_.post_limit = config_.post_limit;
    own_.streams = config_.links_stream_from() != kNeverStreams;
    own_.segment_bytes = config_.segment_bytes;
    own_.eager_limit = config_.eager_limit;
    own_.spread_degree = config_.spread_degree;

    // Also where data goes by tcp: who shares a segment sees the others of its host die at once, and needs no store to decide.
    if (auto s = giver_.listen(config_.job)) {
        own_.domain = id_.domain;
        own_.socket = giver_.name();
        own_.nonce = giver_.nonce();
    } else if (config_.transport == TransportChoice::Shm || sums_need_memory()) {
        return s;
    } else {
        say("no shared memory with other ranks: " + s.message);
    }
    if (config_.transport != TransportChoice::Shm) {
        TcpConfig tcp;
        tcp.job = config_.job;
        tcp.slot = config_.rank;
        tcp.incarnation = config_.incarnation;
        tcp.world_size = config_.world_size;
        tcp.host = id_.host;
        tcp.heartbeat = config_.heartbeat;
        tcp.interface_ = config_.interface_;
        tcp.has_secret = config_.has_secret;
        tcp.secret = config_.secret;
        tcp_ = std::make_unique<TcpTransport>(tcp, loop_, engine_);
        auto s = tcp_->listen();
        if (s) {
            own_.tcp = tcp_->address();
        } else {
            tcp_.reset();
            // An interface was asked for by name: not to have it is the user's error, also where shared memory would do.
            if (config_.transport == TransportChoice::Tcp || !config_.interface_.empty()) return s;
            no_tcp_ = s.message;
            say("no tcp to other hosts: " + no_tcp_);
        }
    }
    address_blob_ = own_.encode();
    return {};
}

Status Job::start(std::vector<Bytes> addresses, std::uint64_t boot, bool joining, Time timeout) {
    engine_.lock();
    if (!started_) {
        blobs_ = std::move(addresses);
        boot_ = boot;
        joining_ = joining;
        deadline_ = IoLoop::now() + timeout;
        if (auto s = start_thread(&progress_, "ftcomm-progress", [this] { progress_main(); }); !s) {
            engine_.unlock();
            return s;
        }
        started_ = true;
    }
    const auto look = IoLoop::now() + 1'000'000'000;
    for (;;) {
        if (formed_) break;
        auto seen = engine_.changes();
        engine_.unlock();
        auto result = engine_.wait_change(seen, look);  // the formation minds the deadline
        if (result == Engine::Wait::Interrupted) return Status::error(Code::Interrupted, "a signal came while the job started");
        if (result == Engine::Wait::Timeout) return Status::error(Code::Interrupted, "the job has not started yet");
        if (result == Engine::Wait::Closed) return Status::error(Code::Closed, "the job was closed while it started");
        engine_.lock();
    }
    auto status = formation_;
    engine_.unlock();
    return status;
}

Status Job::leave(Time timeout) {
    auto deadline = timeout > 0 ? IoLoop::now() + timeout : 0;
    RequestPtr request;
    {
        Engine::Hold hold(engine_);
        if (left_) return {};
        if (!leave_request_) {
            never_in_ = engine_.node().comm_solo(0) && !config_.replays();
            leave_request_ = engine_.node().leave(IoLoop::now());
        }
        request = leave_request_;
    }
    auto result = engine_.wait(request, deadline);
    if (result == Engine::Wait::Interrupted) return Status::error(Code::Interrupted, "a signal came while this rank was leaving");
    if (result == Engine::Wait::Closed) return Status::error(Code::Closed, "the job is closed");
    auto status =
        result == Engine::Wait::Timeout
            ? Status::error(Code::Timeout, "the others still need this rank: they will see it as failed when it ends now")
            : request->status;
    if (!status) return status;
    if (tcp_) {
        // What was sent last is still on its way; after two heartbeats nobody counts on it.
        engine_.lock();
        tcp_->flush();
        auto until = IoLoop::now() + 2 * config_.heartbeat;
        while (!tcp_->all_acknowledged() && IoLoop::now() < until) {
            auto seen = engine_.changes();
            engine_.unlock();
            engine_.wait_change(seen, until);
            engine_.lock();
        }
        engine_.unlock();
    }
    {
        Engine::Hold hold(engine_);
        left_ = true;
    }
    running_.store(false, std::memory_order_release);
    engine_.stop();
    if (progress_.joinable()) progress_.join();
    loop_.stop();
    if (log_ && config_.log_remove) log_->remove_if_last();
    return {};
}

// Ends every wait of the formation.
void Job::stop_forming() {
    if (stop_event_ < 0) return;
    std::uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(stop_event_, &one, sizeof one);
}

void Job::close() {
    if (closed_) return;
    closed_ = true;
    running_.store(false, std::memory_order_release);
    stop_forming();
    engine_.stop();
    if (progress_.joinable()) progress_.join();
    if (store_) store_->stop(2 * config_.heartbeat);
    loop_.stop();
    engine_.wait_until_unused();
    loop_.close_sockets();
    fork_guard::remove(this);
    {
        Engine::Hold hold(engine_);
        engine_.drop_node();
        log_.reset();
        engine_.set_parts({});
        if (watch_) watch_->close();
        giver_.close();
        if (tcp_) tcp_->stop();
    }
    dispatcher_.stop();
    asker_.close();
    segment_.close();
    if (stop_event_ >= 0) ::close(stop_event_);
    stop_event_ = -1;
}

void Job::close_in_child() {
    loop_.close_in_child();
    if (tcp_) tcp_->close_in_child();
    if (store_) store_->close_in_child();
    if (watch_) watch_->close_in_child();
    start_watch_.close_in_child();
    giver_.close_in_child();
    asker_.close();
    if (segment_.fd() >= 0) ::close(segment_.fd());  // the mapping did not come along (MADV_DONTFORK)
    if (stop_event_ >= 0) ::close(stop_event_);
    engine_.raw_mutex().unlock();
}

std::string Job::info_json() {
    Engine::Hold hold(engine_);
    Json j;
    j.begin();
    j.key("job").text(config_.job).key("rank").number(config_.rank).key("world_size").number(config_.world_size);
    j.key("incarnation").number(config_.incarnation).key("pid").number(id_.pid);
    j.key("heartbeat").seconds(config_.heartbeat).key("timeout").seconds(config_.timeout);
    j.key("transport").text(to_string(config_.transport)).key("running").boolean(running());
    j.key("flat_limit").number(config_.flat_limit).key("pull_limit").number(config_.pull_limit);
    j.key("reduce_pull_limit").number(config_.reduce_pull_limit);
    j.key("segment_bytes").number(config_.segment_bytes);
    j.key("eager_limit").number(config_.eager_limit).key("stream_limit").number(config_.stream_limit);
    j.key("stage_limit").number(config_.stage_limit).key("post_limit").number(config_.post_limit);
    j.key("streams").boolean(own_.streams);
    j.key("spread_degree").number(config_.spread_degree);
    if (cells_ != nullptr || store_ != nullptr) j.key("authority").text(cells_ != nullptr ? "shm" : "store");
    if (transport_ != nullptr && engine_.has_node()) {
        j.key("epoch").number(engine_.node().epoch()).key("alive").numbers(engine_.node().alive_slots().list());
        j.key("crowded").boolean(engine_.node().is_crowded());
        j.key("member").boolean(!engine_.node().comm_solo(0));  // no: a replacement that is not in yet
        if (const auto group = engine_.node().log_group(); !group.empty()) j.key("log_group").numbers(group.list());
        j.key("links").begin_list();
        for (int slot = 0; slot < config_.world_size; ++slot)
            j.text(slot == config_.rank ? "self" : transport_->is_shm(slot) ? "shm" : "tcp");
        j.end_list();
        j.key("max_payload").number(transport_->max_payload());  // what the small-message algorithm takes at most
        j.key("peer_memory").begin_list();                       // ranks whose memory this one may read
        for (int slot = 0; slot < config_.world_size; ++slot)
            if (slot != config_.rank && transport_->shares_memory(slot)) j.number(slot);
        j.end_list();
        j.key("reads_refused").boolean(engine_.node().reads_refused());
        j.key("lacks_windows").boolean(engine_.node().lacks_windows());
    }
    if (segment_.is_open()) {
        j.key("shared_memory").begin().key("size").number(segment_.size());
        j.key("used").number(segment_.header().used.load(std::memory_order_relaxed)).end();
    }
    if (log_ != nullptr) {
        j.key("log").begin().key("resident").number(log_->resident()).key("spilled").number(log_->spilled()).end();
    }
    if (tcp_ != nullptr && running()) j.key("tcp").raw(tcp_->stats_json());
    j.key("robust_futex_wait").text(has_futex_waitv() ? "futex_waitv" : "bell only");
    j.end();
    return j.str();
}

}  // namespace ftcomm
