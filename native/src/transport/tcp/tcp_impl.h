// The parts of TcpTransport that its files share: links, and who may touch what.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "transport/tcp/connection.h"
#include "transport/tcp/session.h"
#include "transport/tcp/tcp_transport.h"

namespace ftcomm {

namespace tcp {

using ConnectionPtr = std::shared_ptr<Connection>;

// Everything between this process and one incarnation of a slot.
struct Link {
    Link(int slot_, std::uint32_t incarnation_, std::size_t ring_bytes)
        : slot(slot_), incarnation(incarnation_), session(ring_bytes) {}

    const int slot;
    const std::uint32_t incarnation;
    std::uint64_t process = 0;       // 0: not known yet
    std::uint64_t host = 0;
    Session session;
    ConnectionPtr current;           // established
    // Number of the established connection, equal on both sides; it decides between two that were made at once.
    std::uint64_t generation = 0;
    bool detached = false, linked = false;
    bool delivering = false;         // a frame of it is on its way up: it is not consumed yet
    Time last_heard = 0, last_sent = 0;

    // Dialing: the addresses one after the other, each a little later or when the one before has failed.
    std::vector<Address> addresses;
    std::size_t last_good = SIZE_MAX;
    bool dialing = false;
    std::vector<std::size_t> order;  // of this round
    std::size_t next = 0;
    std::size_t refused = 0;
    bool last_good_refused = false;
    std::vector<ConnectionPtr> dials;
    IoLoop::TimerId dial_timer = 0;
    Time backoff = 0;
    int refusals = 0;                // rounds of dialing in a row that were refused
    std::string why;                 // last reason for not being connected
};
using LinkPtr = std::shared_ptr<Link>;

}  // namespace tcp

class TcpImpl {
public:
    TcpImpl(TcpConfig config, IoLoop& loop, TcpEvents& events);

    // tcp_links.cc
    Status listen();
    Status start(const std::vector<Bytes>& peers, std::uint64_t boot);
    void stop();
    tcp::LinkPtr make_link(int slot, std::uint32_t incarnation);
    tcp::LinkPtr current(int slot) const;
    tcp::LinkPtr find(int slot, std::uint32_t incarnation) const;
    void drop(const tcp::LinkPtr& link);
    void attach(int slot, std::uint32_t incarnation);
    void detach(int slot);
    void tick();
    void cut(int slot);
    bool all_acknowledged() const;
    bool is_awaited(const tcp::Link& link) const;

    // tcp_accept.cc
    void watch_listener(int fd);
    void on_acceptable(int fd);
    void drop_pending(const tcp::ConnectionPtr& c, const std::string& why);
    void on_pending(const tcp::ConnectionPtr& c, std::uint32_t events);
    void decide(const tcp::ConnectionPtr& c);

    // tcp_dial.cc
    void schedule_dial(const tcp::LinkPtr& link, Time delay);
    void begin_dial(const tcp::LinkPtr& link);
    void dial_next(const tcp::LinkPtr& link);
    void on_dial(const tcp::ConnectionPtr& c, std::uint32_t events);
    void dial_ended(const tcp::ConnectionPtr& c, const std::string& why);
    void cancel_dials(const tcp::LinkPtr& link, bool confirmed_too);
    void round_failed(const tcp::LinkPtr& link);

    // tcp_link_io.cc
    // Runs the handshake over what has arrived. False: the connection has ended.
    bool advance_handshake(const tcp::ConnectionPtr& c, std::uint32_t events, std::string* why);
    void install(const tcp::ConnectionPtr& c, const tcp::LinkPtr& link, std::uint64_t peer_received);
    void on_event(const tcp::ConnectionPtr& c, std::uint32_t events);
    void on_established(const tcp::ConnectionPtr& c, std::uint32_t events);
    enum class Taken : std::uint8_t { All, Broken, Detached };
    Taken take_arrived(const tcp::ConnectionPtr& c, const char** why);
    bool take_frames(const tcp::ConnectionPtr& c);
    void drain(const tcp::LinkPtr& link);
    // For the frame at the front; whether what arrives may go on to where it went so far.
    bool find_place(const tcp::Link& link, tcp::Connection& c, const FrameHeader& header);
    bool is_in_place(const tcp::Link& link, const tcp::Connection& c);
    void flush(const tcp::LinkPtr& link);  // never calls up: errors are left to the loop
    void ask(const tcp::LinkPtr& link);    // the peer, if it is there, answers at once
    void broken(const tcp::LinkPtr& link, const std::string& why);
    void check_idle();

    // tcp_transport.cc
    void committed(const tcp::LinkPtr& link);  // a frame

    void log(const std::string& text) { events_.on_log("tcp: " + text); }
    tcp::Identity identity() const;
    tcp::Digest random_bytes() const;
    Time fraction(int n) const { return std::max<Time>(config_.heartbeat / n, 1'000'000); }
    // Wraps a handler or timer so that it does nothing once the transport has stopped.
    template <class F>
    auto guarded(F fn) {
        return [alive = std::weak_ptr<int>(alive_), fn = std::move(fn)](auto... args) mutable {
            if (!alive.expired()) fn(args...);
        };
    }

    TcpConfig config_;
    IoLoop& loop_;
    TcpEvents& events_;
    std::shared_ptr<int> alive_ = std::make_shared<int>(0);
    tcp::FdTable fds_;
    std::uint64_t process_ = 0, boot_ = 0;
    tcp::Digest key_{};
    std::vector<int> listeners_;
    std::vector<tcp::Address> addresses_;
    Bytes address_;
    bool started_ = false, stopped_ = false, forked_ = false;

    std::vector<std::map<std::uint32_t, tcp::LinkPtr>> links_;  // per slot, by incarnation
    std::vector<std::int64_t> attached_;                        // per slot: incarnation that sends go to, -1: none
    std::vector<std::int64_t> refused_;                         // per slot: incarnations up to here are voted out
    std::set<int> waiting_for_attach_;                          // reserve was called before there was a link
    std::deque<tcp::ConnectionPtr> pending_;                    // accepted, not authenticated; oldest first
    Time last_tick_ = 0, silence_from_ = 0;
    bool was_idle_ = true;
};

}  // namespace ftcomm
