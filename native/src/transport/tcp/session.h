// Exactly-once, in-order frames between two process incarnations, across any number of connections. Sans-IO.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "transport/tcp/send_ring.h"
#include "transport/tcp/wire.h"

namespace ftcomm::tcp {

// Frames are numbered from 1. Both sides say in the handshake how far they have received; each then sends from there.
// What was acknowledged is forgotten, what was not is sent again over the next connection; the receiver drops what it
// has. A gap, a wrong checksum or an impossible number breaks the connection, never the session.
class Session {
public:
    explicit Session(std::size_t ring_bytes);

    // Sending. reserve may be called without a connection: frames wait in the ring.
    std::byte* reserve(std::uint32_t length);
    void commit(const FrameHeader& header);
    // Instead of both, as Transport::send_from.
    bool send_from(const FrameHeader& header, const Held& payload);
    // As Transport::take_back.
    void take_back(std::uint64_t comm, bool has_come);
    void want_ack(bool at_once);        // a frameless header goes out soon; at_once: the peer shall answer
    void corrupt_last();                // fault injection: damages the last committed frame until disconnected()

    // Connections. False: the peer claims frames that were never sent.
    bool connected(std::uint64_t peer_received);
    void disconnected();
    bool is_connected() const { return connected_; }

    // Output: what to write next (0: nothing), and how much of it was written.
    int gather(iovec* out, int max);
    void wrote(std::size_t bytes);
    bool wants_write() const;

    // Input: looks at the first frame in `data`. placed: its payload, which is not there, but whole here.
    struct Step {
        enum class Kind : std::uint8_t { More, Frame, Nothing, Broken } kind = Kind::More;
        std::size_t consumed = 0;   // Frame, Nothing (control, duplicate)
        std::size_t needed = 0;     // More: the whole frame has this size
        bool is_next = false;       // More: its header is there, and it is the next one
        FrameHeader header{};       // Frame, and More if is_next
        ByteView payload{};         // Frame: inside `data`, or `placed`
        const char* reason = "";    // Broken
    };
    Step parse(ByteView data, ByteView placed = {});

    std::uint64_t received() const { return received_; }
    std::uint64_t acknowledged() const { return acked_; }
    bool all_acknowledged() const { return acked_ == ring_.last(); }
    bool owes_ack() const { return ack_sent_ != received_; }
    // A reserve was refused, and the room it asked for is there now. True once per refusal.
    bool take_writable();
    std::uint32_t max_payload() const;

    struct Stats {
        std::uint64_t sent = 0, received = 0, resent = 0, duplicates = 0, broken = 0, connections = 0;
    };
    const Stats& stats() const { return stats_; }

private:
    void seal(std::byte* at, WireHeader& header) const;
    void seal_outside(std::uint64_t number, SendRing::Frame& frame);
    void release();
    Step broken(const char* reason);

    SendRing ring_;
    std::byte* reserved_ = nullptr;
    std::uint32_t reserved_length_ = 0, refused_length_ = 0, refused_outside_ = 0;
    bool refused_ = false;

    bool connected_ = false;
    std::uint64_t cursor_ = 1;         // next frame to write, of which
    std::size_t cursor_offset_ = 0;    // this much is written
    std::uint64_t highest_sent_ = 0;
    std::uint64_t acked_ = 0;

    bool control_wanted_ = false, control_at_once_ = false, control_active_ = false;
    std::size_t control_offset_ = 0;
    std::byte control_[sizeof(WireHeader)];

    std::uint64_t received_ = 0, ack_sent_ = 0;
    std::size_t unacknowledged_bytes_ = 0;
    std::size_t ack_after_;

    std::uint64_t corrupted_ = 0;      // number of the damaged frame
    Stats stats_;
};

}  // namespace ftcomm::tcp
