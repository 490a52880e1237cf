#include "runtime/engine.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

#include "transport/shm/liveness_word.h"

namespace ftcomm {
namespace {

// What one turn with the lock hands up at most, so that ticks and posts get their turn.
constexpr std::uint64_t kPollBytes = 1u << 20;

}  // namespace

Engine::Engine(Dispatcher& dispatcher, EventSink events) : dispatcher_(dispatcher), events_(std::move(events)) {}

Engine::~Engine() = default;

void Engine::lock() { mutex_.lock(); }

void Engine::lock_urgently() {
    contenders_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    contenders_.fetch_sub(1, std::memory_order_relaxed);
}

void Engine::give_way() {
    for (int i = 0; i < 64 && contenders_.load(std::memory_order_relaxed) > 0; ++i) ::sched_yield();
}

void Engine::ring_held() {
    if (shm_ != nullptr) shm_->ring_held();
}

void Engine::take_cell_replies() {
    if (node_ == nullptr || parts_.cells == nullptr) return;
    CellReply reply;
    while (parts_.cells->next(&reply)) node_->on_cell(IoLoop::now(), std::move(reply));
}

void Engine::unlock() {
    take_cell_replies();  // they have something to send, too
    if (shm_ != nullptr && !(caller_waits_ && !driving_)) shm_->ring_held();
    if (shm_ != nullptr && !driving_) shm_->hold_bells(false);
    unlock_as_driver();
}

bool Engine::tell_changes() {
    if (!std::exchange(changed_, false)) return false;
    changes_.fetch_add(1, std::memory_order_release);
    if (passive_ > 0) futex_wake(changes_, INT_MAX);
    return true;
}

void Engine::unlock_as_driver() {
    take_cell_replies();
    // Work that this input has made is the driver's, or that of a caller who is about to be it; else the progress thread's.
    const bool work = has_work();
    const bool waits = std::exchange(caller_waits_, false);
    if (work && !driving_ && !waits && progress_sleeps_) shm::ring_progress(*mailbox_);
    const bool changed = tell_changes();
    if ((changed || work) && std::exchange(driver_sleeps_, false)) {
        auto& bell = mailbox_->bell[shm::kDriver - 1];
        bell.fetch_add(1, std::memory_order_release);
        futex_wake(bell, 1);
    }
    mutex_.unlock();
}

void Engine::set_parts(const Parts& parts) {
    parts_ = parts;
    shm_ = parts.shm;
    tcp_ = parts.tcp;
    mailbox_ = parts.self != nullptr ? &parts.self->mailbox : &own_mailbox_;
}

void Engine::set_node(std::unique_ptr<Node> node) {
    node_ = std::move(node);
    if (parts_.sockets != nullptr) parts_.sockets->at(IoLoop::now(), [this] { tick_on_loop(); });
    while (!early_.empty()) {
        auto frame = std::move(early_.front());
        early_.pop_front();
        node_->on_frame(IoLoop::now(), frame.slot, frame.incarnation, frame.header, frame.payload);
    }
}

void Engine::drop_node() {
    node_.reset();
    for (const auto& weak : with_callback_) {
        auto request = weak.lock();
        if (!request || request->done.load(std::memory_order_acquire)) continue;
        request->status = Status::error(Code::Closed, "the job was closed before the operation was done");
        request->done.store(true, std::memory_order_release);
        completed(request);
    }
    with_callback_.clear();
}

bool Engine::on_done(const RequestPtr& request, std::function<void()> fn) {
    Hold hold(*this);
    if (request->done.load(std::memory_order_acquire) || node_ == nullptr)
        return false;  // or nobody will ever say that it is done
    request->on_done = [fn = std::move(fn)](Request&) { fn(); };
    if (with_callback_.size() >= prune_at_) {
        std::erase_if(with_callback_, [](const auto& weak) { return weak.expired(); });
        prune_at_ = 64 + 2 * with_callback_.size();
    }
    with_callback_.push_back(request);
    return true;
}

void Engine::lend_sockets(bool lent) {
    if (parts_.sockets == nullptr || stopped() || (lent && !parts_.sockets->has_sockets())) return;
    parts_.sockets->lend_sockets(lent);
}

bool Engine::poll_rings(std::uint64_t budget) {
    polling_ = true;
    polled_at_ = 0;
    bool did = shm_ != nullptr && shm_->poll(budget);
    if (shm_ != nullptr && node_ != nullptr && (shm_->has_news() || (did && shm_->overlooks()))) {
        node_->look(frame_time());
        did = true;
    }
    polling_ = false;
    return did;
}

bool Engine::poll(bool all) {
    bool did = poll_rings(kPollBytes);
    // A look at them costs as much as a frame of a ring: when there is none, and else so that they do not wait for ever.
    if (sockets_lent() && !stopped() && (!did || all || !driving_ || ++polls_ % 16 == 0) && parts_.sockets->poll_sockets()) {
        did = true;
        polled_at_ = 0;  // it may have taken long
    }
    // In a bubble: the driver waits, and nothing has come.
    if (!has_work() && (did || !driving_ || !has_idle_work())) return did;
    ring_held();  // work may take long
    // Who works has a processor; the progress thread, which waits for deaths, may have to wait for one.
    if (parts_.watch != nullptr) parts_.watch->check_liveness();
    node_->work(IoLoop::now());
    polled_at_ = 0;
    return true;
}

Time Engine::frame_time() {
    if (!polling_) return IoLoop::now();
    if (polled_at_ == 0) polled_at_ = IoLoop::now();
    return polled_at_;
}

bool Engine::sleep_as(shm::Sleeper who) {
    if (shm_ != nullptr) shm_->watch(false);
    mailbox_->sleeper.store(who, std::memory_order_seq_cst);
    if (!has_mail() && !has_work() && !(who == shm::kDriver && has_idle_work())) return true;
    mailbox_->sleeper.store(shm::kAwake, std::memory_order_seq_cst);
    return false;
}

void Engine::tick() {
    // Whatever has arrived comes before any deadline (M11).
    poll(true);
    if (parts_.watch != nullptr) parts_.watch->check_ticks();
    node_->on_tick(IoLoop::now());
}

// M11 for sockets. Ticks from the progress thread would go on while the io thread waits for a processor with everything that
// the others have sent still unread: they would all look silent. The loop reads before it looks at deadlines, and when it did
// not run, the gap is the node's own.
void Engine::tick_on_loop() {
    if (node_ == nullptr) return;
    tick();
    parts_.sockets->at(IoLoop::now() + node_->tick_interval(), [this] { tick_on_loop(); });
}

void Engine::run_progress() {
    std::vector<FutexWord> words;
    lock_urgently();
    while (!stopped()) {
        auto& bell = mailbox_->bell[shm::kProgress - 1];
        words.assign(1, {&bell, bell.load(std::memory_order_acquire)});  // before anything that it may announce
        if (parts_.watch != nullptr) {
            parts_.watch->look_for_peers();
            parts_.watch->check_liveness();
        }
        if (shm_ != nullptr) shm_->look_for_peers();
        auto now = IoLoop::now();
        bool due = now >= next_tick_;
        if (due) {
            next_tick_ = now + node_->tick_interval();
            if (parts_.self != nullptr) parts_.self->ticks.fetch_add(1, std::memory_order_relaxed);
        }
        if (due && parts_.sockets == nullptr) tick();
        else if (!driving_) poll();
        bool sleep = parts_.watch == nullptr || parts_.watch->words(&words);
        const bool burst = burst_.look(now);
        if (!burst && !driving_) lend_sockets(false);
        if (sleep && !driving_) sleep = burst ? !has_work() && !has_mail() : sleep_as(shm::kProgress);
        progress_sleeps_ = sleep;
        const auto until = burst ? std::min(next_tick_, burst_.due()) : next_tick_;
        unlock();
        if (sleep) sleep_until(until, words);
        else give_way();
        lock_urgently();
        progress_sleeps_ = false;
        if (!driving_) mailbox_->sleeper.store(shm::kAwake, std::memory_order_seq_cst);
    }
    unlock();
}

// Or until one of the words is another. A look in a burst is left to those who are in there, without asking for the lock.
void Engine::sleep_until(Time until, std::span<const FutexWord> words) {
    while (futex_wait_any(words, until) == ETIMEDOUT) {
        const auto now = IoLoop::now();
        const auto again = burst_.served_until(now);
        if (again == 0 || now >= next_tick_) return;
        until = std::min(next_tick_, again);
    }
}

void Engine::stop() {
    lock();
    if (node_ != nullptr) node_->halt();
    lend_sockets(false);  // the peers have still to be answered
    stopped_.store(true, std::memory_order_release);
    notify();
    shm::ring_progress(*mailbox_);
    unlock();
}

void Engine::wait_until_unused() {
    lock();
    while (inside_ > 0) {
        notify();
        auto seen = changes() + 1;  // the value after this unlock
        ++passive_;
        unlock();
        futex_wait(changes_, seen, 0);
        lock();
        --passive_;
    }
    unlock();
}

void Engine::notify() { changed_ = true; }

void Engine::evidence(int slot, std::uint32_t incarnation, Evidence what) {
    if (shm_ != nullptr) shm_->drain(slot, incarnation);
    if (tcp_ != nullptr) tcp_->drain(slot, incarnation);
    if (node_ != nullptr) node_->on_evidence(IoLoop::now(), slot, incarnation, what);
}

void Engine::event(const NodeEvent& event) { events_(&event, {}); }

void Engine::completed(const RequestPtr& request) {
    notify();
    // An alarm wakes the waiter, but is no end.
    if (request->on_done && request->done.load(std::memory_order_relaxed))
        dispatcher_.post([request] { request->on_done(*request); });
}

void Engine::on_frame(int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload) {
    if (node_ != nullptr) node_->on_frame(frame_time(), slot, incarnation, header, payload);
    else early_.push_back({slot, incarnation, header, Bytes(payload.begin(), payload.end())});
}

void Engine::on_writable(int slot) {
    if (node_ != nullptr) node_->on_writable(IoLoop::now(), slot);
}

void Engine::on_broken(int slot, std::uint32_t incarnation) {
    on_log("the shared memory ring from rank " + std::to_string(slot) + "." + std::to_string(incarnation) +
           " holds what no rank writes: it is not read any more");
}

void Engine::on_heard(int slot, std::uint32_t incarnation) {
    if (node_ != nullptr) node_->on_heard(IoLoop::now(), slot, incarnation);
}

void Engine::on_suspicion(int slot, std::uint32_t incarnation, Evidence what) {
    // Of a rank of this host the liveness word says more than what became of a connection.
    const auto* here = parts_.segment != nullptr ? parts_.segment->find_instance(slot, incarnation) : nullptr;
    if (here != nullptr && is_held(here->liveness.load(std::memory_order_acquire))) return;
    evidence(slot, incarnation, what);
}

void Engine::on_linked(int, std::uint32_t) { notify(); }

void Engine::on_log(const std::string& text) { events_(nullptr, text); }

}  // namespace ftcomm
