// One rank's part in one job: everything behind an ft_job.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collectives/posts.h"
#include "ftcomm/ftcomm.h"
#include "runtime/address.h"
#include "runtime/engine.h"
#include "runtime/file_log.h"
#include "runtime/fork_guard.h"
#include "runtime/handoff.h"
#include "runtime/host.h"
#include "runtime/log_groups.h"
#include "runtime/runtime_transport.h"
#include "runtime/start_watch.h"
#include "runtime/store_authority.h"

namespace ftcomm {

struct JobConfig {
    std::string job;
    int rank = 0, world_size = 1;
    std::uint32_t incarnation = 0;
    Time heartbeat = 0, timeout = 0;
    TransportChoice transport = TransportChoice::Auto;
    AuthorityChoice authority = AuthorityChoice::Auto;
    std::string interface_, host, faults;
    bool has_secret = false;
    Bytes secret;
    bool has_store = false;
    ft_store store{};
    std::uint64_t flat_limit = 0, pull_limit = 0, reduce_pull_limit = 0, segment_bytes = 0, eager_limit = 65536, stream_limit = 0,
                  stage_limit = 0, post_limit = Posts::kMost, spread_degree = kSpreadDegree;
    bool peer_memory = true;  // ranks of one host read each other's memory where the kernel lets them
    std::function<void(const std::string& json)> on_event;

    Policy policy = Policy::Raise;
    // Policy replay
    pairlog::LogConfig log;  // path: the folder for all hosts that share it
    bool log_remove = false;
    bool log_late = false;
    LogGroups log_groups;
    RankSet finished;
    bool replays() const { return policy == Policy::Replay; }

    // Of this machine's links, or kNeverStreams: for then other algorithms are the faster ones, so nearly all of what large operations put into
    // links has to be as long. (Most of their segments are shorter than they may be: equal_segments() in calls.cc.) Whether it is never
    // is the same on all ranks of a machine, also where some share processors.
    std::uint64_t links_stream_from(bool own_processor = true) const {
        const auto most = stream_limit > 0 ? stream_limit : kCrowdedStreamLimit;
        if (!kCanStream || 2 * most > segment_bytes) return kNeverStreams;
        if (stream_limit > 0) return stream_limit;
        return own_processor ? default_stream_limit() : std::max(default_stream_limit(), kCrowdedStreamLimit);
    }

    // Checks everything that comes from outside, the environment's table of algorithms included.
    static Status read(const ft_job_config& from, JobConfig* out);
};

// Of the record in the store.
inline constexpr std::size_t kMaxView = 256u << 10;

class Job final : public ForkSensitive {
public:
    explicit Job(JobConfig config);
    ~Job() override;  // close()

    Status prepare();                       // binds, listens: address() is then complete
    const Bytes& address() const { return address_blob_; }
    void set_unlogged() { unlogged_ = true; }  // before start()
    // Code::Interrupted: a signal came; call again to go on waiting.
    Status start(std::vector<Bytes> addresses, std::uint64_t boot, bool joining, Time timeout);
    Status leave(Time timeout);             // likewise
    void close();

    // Whether on_event hears of all events, or only of the one after which this process must do no more. Any thread.
    void tell(bool all) { tells_all_.store(all, std::memory_order_relaxed); }

    Engine& engine() { return engine_; }
    const JobConfig& config() const { return config_; }
    bool running() const { return running_.load(std::memory_order_acquire); }
    std::string info_json();

    void lock_for_fork() override { engine_.raw_mutex().lock(); }
    void unlock_after_fork() override { engine_.raw_mutex().unlock(); }
    void close_in_child() override;

private:
    // --- formation.cc, on the progress thread
    void progress_main();
    Status form();
    Status read_addresses();
    Status share_memory(const RankSet& local);
    Status give_segment(const RankSet& others);
    Status get_segment(const RankSet& others);
    Status join_host();                     // join_host.cc
    Status join_segment(bool must);
    bool must_join_segment();
    Status claim_segment(bool* held);
    Status ask_for_segment(const std::string& socket, std::uint64_t nonce, Time until);
    Status read_view(Bytes* view);
    // Whether tcp must not take the place of shared memory that cannot be had. Under replay the order of a sum depends on who shares
    // memory, so that must not depend on a process's luck (L7).
    bool sums_need_memory() const {
        return config_.replays() && config_.peer_memory && config_.transport != TransportChoice::Tcp;
    }
    bool needs_memory() const { return config_.transport == TransportChoice::Shm || !tcp_ || sums_need_memory(); }
    Status choose_authority(const RankSet& local);
    Status write_first_view();
    Status link_tcp();
    Status open_log();
    Status make_node();
    std::vector<std::int32_t> groups() const;  // the log group of each rank, empty: none
    int lowest() const { return (RankSet::first(config_.world_size) - config_.finished).lowest(); }
    void stop_forming();
    void say(const std::string& line) { engine_.on_log(line); }

    const JobConfig config_;
    const std::uint64_t job_hash_;
    const HostIdentity id_;
    std::atomic<bool> tells_all_{true};
    Dispatcher dispatcher_;
    Engine engine_;
    IoLoop loop_;
    HandoffGiver giver_;
    Address own_;
    std::string no_tcp_;  // why, where it was wanted
    Bytes address_blob_;
    int stop_event_ = -1;                   // readable: formation gives up

    // Given to start(), then the progress thread's.
    std::vector<Bytes> blobs_;
    std::vector<Address> addresses_;        // job 0: not known
    std::uint64_t boot_ = 0;
    bool joining_ = false, unlogged_ = false;
    Time deadline_ = 0;

    HandoffKey key_;
    HandoffAsker asker_;
    shm::Segment segment_;
    shm::Instance* self_ = nullptr;
    StartWatch start_watch_;
    RankSet have_;                          // ranks of this host that map the segment
    class LivenessHolder* liveness_ = nullptr;
    std::unique_ptr<ShmTransport> shm_;
    std::unique_ptr<TcpTransport> tcp_;
    std::unique_ptr<RuntimeTransport> transport_;
    std::unique_ptr<ShmAuthority> cells_;
    std::unique_ptr<StoreAuthority> store_;
    std::unique_ptr<Watch> watch_;
    std::unique_ptr<FileLog> log_;
    Bytes first_view_;

    // Under the engine's lock.
    bool started_ = false, formed_ = false, left_ = false, closed_ = false;
    bool never_in_ = false;  // it leaves before anybody has let it in
    Status formation_;
    RequestPtr leave_request_;
    std::atomic<bool> running_{false};
    std::thread progress_;
};

}  // namespace ftcomm
