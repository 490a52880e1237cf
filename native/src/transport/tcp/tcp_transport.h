// Frames to ranks on other hosts (or to all, with transport="tcp"): authenticated connections under resumable sessions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/rank_set.h"
#include "base/status.h"
#include "runtime/io_loop.h"
#include "transport/transport.h"

namespace ftcomm {

// What comes up. From the io loop's handlers and timers with the engine locked (so on its thread, or on one that polls its sockets),
// never from inside a call of the transport.
// The receiver may call back into the transport (reserve, commit, attach, detach) from any of them.
class TcpEvents {
public:
    virtual ~TcpEvents() = default;
    virtual void on_frame(int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload) = 0;
    // Where the payload of the next frame shall go, which has begun to arrive; null: nowhere in particular. Asked again and again until it is
    // whole: when the answer changes it is sent again. Then it goes up by on_frame, from there.
    virtual std::byte* place(int slot, std::uint32_t incarnation, const FrameHeader& header) {
        (void)slot, (void)incarnation, (void)header;
        return nullptr;
    }
    virtual void on_writable(int slot) = 0;
    virtual void on_heard(int slot, std::uint32_t incarnation) = 0;   // anything arrived, at most once per read
    // Evidence::Reset only: the peer's addresses refuse and nothing has been heard since. Once per silence.
    virtual void on_suspicion(int slot, std::uint32_t incarnation, Evidence evidence) = 0;
    virtual void on_linked(int slot, std::uint32_t incarnation) = 0;  // first connection of this incarnation is up
    virtual void on_idle() {}                                         // all_acknowledged() has become true
    virtual void on_log(const std::string& text) = 0;                 // one line for a debug log
};

struct TcpConfig {
    std::string job;
    int slot = 0;
    std::uint32_t incarnation = 0;
    int world_size = 1;
    std::uint64_t host = 0;           // own host identity hash
    Time heartbeat = 1'000'000'000;
    std::string interface_;           // interface name or address; empty: all usable ones (loopback without a secret)
    bool has_secret = false;
    Bytes secret;
    std::size_t ring_bytes = 8u << 20;  // per peer: frames kept until acknowledged
};

class TcpImpl;

// Use: construct and listen() when the job is created (address() is then published), start() once all blobs are there.
// All calls with the engine locked (listen and address may be called before there is anybody to lock against).
class TcpTransport final : public Transport {
public:
    TcpTransport(TcpConfig config, IoLoop& loop, TcpEvents& events);
    ~TcpTransport() override;  // stop()

    // Binds and listens; connections wait in the kernel until start().
    Status listen();
    const Bytes& address() const;  // own blob: slot, incarnation, process nonce, host, addresses

    // Who and where a blob speaks of, or an error for one that is malformed.
    struct PeerInfo {
        int slot = -1;
        std::uint32_t incarnation = 0;
        std::uint64_t host = 0;
    };
    static Status parse_address(ByteView blob, PeerInfo* out);

    // peers[slot]: blob of a slot that is reached by tcp; empty for others, for the own slot and for dead ones. Attaches
    // the incarnations in the blobs and begins to connect. `boot`: the job's boot nonce (part of the handshake's key).
    Status start(const std::vector<Bytes>& peers, std::uint64_t boot);
    RankSet unlinked() const;          // attached by tcp and never yet connected
    std::string why(int slot) const;   // last reason why a link is not up, a sentence; empty: none

    // Asks all peers for an acknowledgement of what was sent; on_idle() when all have answered. For a clean leave.
    void flush();
    bool all_acknowledged() const;     // over connected and attached peers

    // Transport. A slot that is not tcp's: reserve returns nullptr, attach and detach only note the incarnation.
    std::byte* reserve(int slot, std::uint32_t length) override;
    void commit(int slot, const FrameHeader& header) override;
    bool sends_from(int, std::size_t bytes) override { return bytes >= kWorthHolding && bytes % kWholeBytes == 0; }
    bool send_from(int slot, const FrameHeader& header, const Held& payload) override;
    void take_back(int slot, std::uint64_t comm, bool has_come) override;
    void attach(int slot, std::uint32_t incarnation) override;
    void detach(int slot) override;
    void drain(int slot) override;
    void drain(int slot, std::uint32_t incarnation);
    std::uint32_t max_payload() const override;

    void cut(int slot);                // breaks the connection (fault injection); the session resumes
    std::string stats_json() const;    // {"peers":[{"slot":..,"incarnation":..,"connected":..,"reconnects":..,...}]}

    void stop();                       // closes everything; no upcall afterwards
    void close_in_child();             // after fork: closes descriptors; no lock, no free, nothing may follow

private:
    static constexpr std::size_t kWorthHolding = 4u << 10;
    std::unique_ptr<TcpImpl> impl_;
};

}  // namespace ftcomm
