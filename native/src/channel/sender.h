// Outgoing frames of one rank: straight into the transport while there is room, else queued here in order.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "base/bytes.h"
#include "base/shared_writer.h"
#include "base/streaming.h"
#include "channel/frame.h"
#include "transport/transport.h"

namespace ftcomm {

class Sender {
public:
    // `stream_limit`: base/streaming.h, of what goes to ranks of this host; `paced`: past the caches only while that is faster; `quick`: what
    // of so many times that is_quick() is asked where that is not known, it says yes once, and 0: never.
    explicit Sender(Transport& transport, std::uint64_t stream_limit = kNeverStreams, bool paced = false, std::uint32_t quick = 0)
        : transport_(transport), stream_limit_(stream_limit), paced_(paced), quick_(quick) {}

    std::uint32_t max_payload() const { return transport_.max_payload(); }
    // True when nothing is queued for the slot: pumps that can wait (point-to-point, direct) stop when it is false.
    bool clear(int slot) const { return queues_.empty() || !queues_.contains(slot); }

    // Room in the transport for a payload, or nullptr: then build it elsewhere and use `queue`.
    std::byte* reserve(int slot, std::uint32_t length);
    // Copies to room that was reserved.
    void fill(int slot, std::byte* room, const void* from, std::size_t bytes);
    // Whether so many go past the caches, or would where that is slower than into them.
    bool streams(int slot, std::size_t bytes) const { return bytes >= stream_limit_ && transport_.is_near(slot); }
    // Whether what is in the caches comes to this rank sooner by the link than it can read it. Whoever asks, and does it the other way, has
    // made one more copy past the caches.
    bool is_quick(int slot);
    void commit(int slot, const FrameHeader& header) { transport_.commit(slot, header); }
    // As Transport's, of what is held.
    bool sends_from(int slot, std::size_t bytes) const { return transport_.sends_from(slot, bytes); }
    bool send_from(int slot, FrameHeader header, const Held& payload);
    void queue(int slot, const FrameHeader& header, Bytes payload);
    // Memory to build a payload in, for `queue`: used again and again, because fresh pages cost more than the sum that goes in.
    Bytes scratch(std::uint32_t length);

    // Copies the payload at once, or queues a copy.
    void send(int slot, FrameHeader header, ByteView payload = {});
    // The payload stays where it is until take_back: it may be sent from there.
    void send_stable(int slot, FrameHeader header, ByteView payload);
    // Splits what is longer than one frame; flags bit 0 says that more follows.
    void send_long(int slot, FrameHeader header, ByteView payload);

    void on_writable(int slot);
    void drop_slot(int slot) { queues_.erase(slot); }
    // Queued collective frames of an attempt that is over: they would be ignored, and their memory goes back to the caller.
    void drop_collectives(std::uint64_t comm);
    // As Transport's, whoever it was sent to, of all that send_stable got: nothing is sent from there any more.
    void take_back(std::uint64_t comm, bool has_come);
    bool has_lent(std::uint64_t comm) const;
    bool idle() const { return queues_.empty(); }

private:
    struct Queued {
        FrameHeader header;
        Bytes owned;
        ByteView stable;
        bool is_stable = false;
    };
    struct Loan {
        int slot;
        std::uint64_t comm;
        bool operator==(const Loan&) const = default;
    };
    SharedWriter& writer(int slot);
    bool hand_over(int slot, const FrameHeader& header, ByteView payload, bool stable);
    void recycle(Bytes&& memory);

    Transport& transport_;
    const std::uint64_t stream_limit_;
    const bool paced_;
    const std::uint32_t quick_;
    std::uint32_t asked_ = 0;
    std::vector<SharedWriter> writers_;  // by slot
    std::map<int, std::deque<Queued>> queues_;  // by slot; no empty ones: with a thousand peers they take 0.7 MB
    std::vector<Bytes> spare_;
    std::vector<Loan> lent_;  // few: the neighbours of operations under way
};

}  // namespace ftcomm
