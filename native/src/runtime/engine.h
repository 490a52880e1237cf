// The node behind one lock, and everything that may give it input: a progress thread, the io thread, and user threads that
// post or wait.
//
// Lock order: fork_guard's, engine, then the innermost ones (dispatcher, io loop's posted list). Code of the user never runs
// with the engine locked.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "communicator/node.h"
#include "runtime/burst.h"
#include "runtime/dispatcher.h"
#include "runtime/shm_authority.h"
#include "runtime/turns.h"
#include "runtime/watch.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace ftcomm {

class Engine final : public NodeHost, public ShmEvents, public TcpEvents, public WatchEvents {
public:
    // An event, or (nullptr) a line for the log. With the engine locked.
    using EventSink = std::function<void(const NodeEvent* event, const std::string& line)>;

    Engine(Dispatcher& dispatcher, EventSink events);
    ~Engine() override;

    // --- the lock. unlock() first finishes the input: cell replies, completions, wake-ups.
    void lock();
    void unlock();  // and bells that were held back, unless the caller drives next
    void lock_urgently();  // for threads of the library and those that wait: a looping thread lets them in
    class Hold {
    public:
        explicit Hold(Engine& e) : e_(e) { e_.lock(); }
        ~Hold() { e_.unlock(); }
        Hold(const Hold&) = delete;
        Hold& operator=(const Hold&) = delete;

    private:
        Engine& e_;
    };
    // Locked, before an input that is waited for at once: who waits can ring for it later.
    // (Where ranks share processors, the one that computes may be on that of the one it is to come for.)
    void hold_bells() {
        if (may_hold_bells()) shm_->hold_bells(true);
    }
    // Locked: the caller goes on to wait() for this, and does the work there that its input has made. To wake the progress thread, too,
    // would have both ask for the lock until that is done.
    void will_wait(const Request& request) { caller_waits_ = !request.done.load(std::memory_order_relaxed) && !request.alarmed; }
    // For fork: the lock alone.
    std::mutex& raw_mutex() { return mutex_; }

    // --- parts, given before the node exists. Any may be absent.
    struct Parts {
        shm::Segment* segment = nullptr;
        shm::Instance* self = nullptr;
        ShmTransport* shm = nullptr;       // frames; nullptr: tcp only
        TcpTransport* tcp = nullptr;
        ShmAuthority* cells = nullptr;
        Watch* watch = nullptr;
        IoLoop* sockets = nullptr;         // with tcp: who reads sockets keeps deadlines
        bool own_processor = false;        // every rank of this machine has one
    };
    void set_parts(const Parts& parts);    // locked
    // Frames that tcp delivered before now are handed to it.
    void set_node(std::unique_ptr<Node> node);  // locked
    // Requests with a callback that are still open complete as closed; their callbacks run.
    void drop_node();                           // locked
    // `fn` runs once on the dispatcher's thread; false: the request is done already.
    bool on_done(const RequestPtr& request, std::function<void()> fn);
    bool has_node() const { return node_ != nullptr; }
    Node& node() { return *node_; }        // locked

    // --- threads
    void run_progress();                   // until stop(); on a thread that blocks all signals
    void stop();                           // any thread: ends run_progress and all waits
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }

    enum class Wait { Done, Timeout, Interrupted, Closed, Alarmed };  // Alarmed: see Request::alarmed; still pending
    // deadline 0: none. now: if the caller has just looked. held: bells may have been held back when it was posted.
    Wait wait(const RequestPtr& request, Time deadline, Time now = 0, bool held = false);
    Wait wait_locked(const RequestPtr& request, Time deadline, Time now);  // locked at entry and exit
    // Sleeps until something has changed since `seen` = changes(): a link came up, a request completed, a stop.
    std::uint32_t changes() const { return changes_.load(std::memory_order_acquire); }
    Wait wait_change(std::uint32_t seen, Time deadline);
    void wait_until_unused();              // after stop(): no user thread is in a wait any more
    void notify();                         // locked: a change

    void evidence(int slot, std::uint32_t incarnation, Evidence what);  // locked; drains first (M10)

    // NodeHost
    void event(const NodeEvent& event) override;
    void completed(const RequestPtr& request) override;
    // ShmEvents and TcpEvents: same meaning on both wires
    void on_frame(int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload) override;
    std::byte* place(int slot, std::uint32_t incarnation, const FrameHeader& header) override {
        return node_ != nullptr ? node_->place(slot, incarnation, header) : nullptr;
    }
    void on_writable(int slot) override;
    void on_broken(int slot, std::uint32_t incarnation) override;
    void on_heard(int slot, std::uint32_t incarnation) override;
    void on_suspicion(int slot, std::uint32_t incarnation, Evidence evidence) override;
    void on_linked(int slot, std::uint32_t incarnation) override;
    void on_idle() override { notify(); }
    void on_log(const std::string& text) override;
    // WatchEvents
    void on_gone(int slot, std::uint32_t incarnation, Evidence what) override { evidence(slot, incarnation, what); }
    void on_ticked(int slot, std::uint32_t incarnation) override { on_heard(slot, incarnation); }

private:
    struct EarlyFrame {
        int slot;
        std::uint32_t incarnation;
        FrameHeader header;
        Bytes payload;
    };

    void give_way();                        // not locked: a mutex is not fair
    void sleep_until(Time until, std::span<const FutexWord> words);  // the progress thread, not locked
    bool poll_rings(std::uint64_t budget);  // locked
    bool poll(bool all = false);  // locked. All: also sockets, if they are lent, when there is something in the rings
    void lend_sockets(
        bool lent);  // locked; if there are any. Lent: they are polled as the rings are, and the io thread is not woken for them
    bool sockets_lent() const { return parts_.sockets != nullptr && parts_.sockets->sockets_lent(); }
    bool sockets_ready() const { return sockets_lent() && parts_.sockets->sockets_ready(); }
    Time frame_time();  // locked
    bool has_mail() const { return shm_ != nullptr && shm_->has_mail(); }
    bool has_work() const { return node_ != nullptr && node_->has_work(); }  // locked
    bool has_idle_work() const { return node_ != nullptr && node_->has_idle_work(); }  // locked
    bool sleep_as(shm::Sleeper who);  // locked. False: there is mail, or work
    Wait drive(const RequestPtr& request, Time deadline);  // locked at entry and exit, as the driver
    bool may_linger(Time now) const { return parts_.own_processor || !turns_.are_long(now); }  // the driver
    bool looks_on();  // locked, as the driver: there is mail
    void linger(const Request& request, std::uint32_t rung, Time now, Time deadline);  // not locked, as the driver
    void take_cell_replies();  // locked
    bool tell_changes();  // locked. To those who wait passively; false: there are none
    void unlock_as_driver();  // it holds bells back until it sleeps or goes
    bool may_hold_bells() const { return shm_ != nullptr && parts_.own_processor; }  // locked
    bool holds_bells() const { return shm_ != nullptr && shm_->holds_any(); }  // locked
    void ring_held();  // locked
    void hand_back();  // locked
    Wait sleep_passively(std::uint32_t seen, Time deadline);  // locked at entry and exit
    void tick();  // locked
    void tick_on_loop();  // locked

    Dispatcher& dispatcher_;
    EventSink events_;

    std::mutex mutex_;
    std::atomic<int> contenders_{0};  // threads that want the lock while one works on, piece after piece

    // Under the lock.
    Parts parts_;
    ShmTransport* shm_ = nullptr;
    TcpTransport* tcp_ = nullptr;
    shm::Mailbox own_mailbox_{};  // without a segment
    shm::Mailbox* mailbox_ = &own_mailbox_;
    std::unique_ptr<Node> node_;
    std::deque<EarlyFrame> early_;
    std::vector<std::weak_ptr<Request>> with_callback_;
    std::size_t prune_at_ = 64;
    bool changed_ = false;  // notify() in this input
    bool driving_ = false;  // a user thread polls
    bool driver_sleeps_ = false;  // or lingers
    bool caller_waits_ = false;  // will_wait() in this input
    Turns turns_;  // the driver's
    bool progress_sleeps_ = false;
    int passive_ = 0;  // threads that sleep on changes_
    int inside_ = 0;  // threads in wait() or wait_change()
    Time next_tick_ = 0;  // the progress thread's
    bool polling_ = false;
    std::uint32_t polls_ = 0;  // that have found something in the rings
    Time polled_at_ = 0;  // the clock as frames of this poll see it: looking costs 30 to 60 ns. 0: not looked yet
    Burst burst_;  // in one the mailbox says that somebody is awake, and nobody rings

    std::atomic<std::uint32_t> changes_{0};
    std::atomic<bool> stopped_{false};
};

}  // namespace ftcomm
