// The one frame of ftcomm: a fixed header, then `length` bytes. Same layout in shared memory, on tcp and in the simulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ftcomm {

enum class FrameKind : std::uint8_t {
    // membership and decisions
    View = 1,        // payload: job view record
    Vote = 2,        // payload: a communicator vote
    Freeze = 3,      // leader -> members: vote now for `attempt`
    Decision = 4,    // payload: decision record
    AgreeVote = 5,   // agree and shrink
    AgreeResult = 6,
    AdmitVote = 7,   // join point
    JoinRequest = 8, // a replacement is waiting
    Leave = 9,
    LeaveOk = 10,
    Goodbye = 11,
    Ping = 12,
    Replaying = 13,  // replay: the sender does again what a process before it has done, and gets on with it
    RestoreAsk = 14,  // replay: the sender has lost its log, and asks what the receiver has of it (communicator/restore.h)
    RestoreReply = 15,
    Votes = 16,  // as Vote, of the sender and those below it in a tree; aux = the view's epoch
    Dispute = 17,  // payload: the communicator's description, of which the receiver may have another
    // collectives
    Enter =
        32,  // receiver of data to its sender: entered, go; of a gather, scatter, all-to-all: with what it has for the other, or where
    ReduceScatter = 33,
    Gather = 34,
    Token = 35,  // a segment's round trip ended without a gather frame: window credit
    Fence = 36,  // step = round, or of its other form, a word to position 0 or its answer
    Flat = 37,  // whole input of a small all-reduce
    Direct = 38,  // gather, scatter, all-to-all item piece; segment = piece index
    PullEnter = 39,  // entered; payload: where this rank's buffers can be read
    PullReady = 40,  // segment = how many segments of the sender's list are final in its buffer; flags 1: and in its log
    GroupEnter = 41,  // as PullEnter, with the sender's group
    GroupSum = 42,  // a delegate's sum over its group, to the segment's owner
    GroupFinal = 43,  // the owner's final, to a group's delegate
    GroupReady = 44,  // as PullReady, to the fellows of the group
    Shared = 45,  // the segment is final, and is in its owner's log, where the receiver reads it; or the payload is it
    ShareAsk = 46,  // to the segment's owner: it cannot be read there
    StageEnter = 47,  // entered, and the first chunk is staged; payload: where the sender's board is
    StageGo = 48,  // segment = the step that all are through with whom the receiver waits for
    // point to point
    Eager = 64,
    Rts = 65,
    Cts = 66,
    Data = 67,
    // logged messages
    LogMark = 68,  // seq = how far the sender's stream to the receiver goes
    LogWant = 69,  // seq = the record that the receiver, on another host, needs next
    LogPiece = 70,  // of record seq; aux = tag, aux2 = bytes of the whole; flags + 1: the first one, + 2: attempt is the CRC-32C
    // of the whole in the sender's log; step & 1: from behind the resume point, step >> 1: which log of the rank
    LogAnswered = 71,  // since mark seq the sender was told something that depends on time, and is in its own log alone
    GroupResume = 72,  // inside a log group: seq = the mark that the sender can go on from
    LogShown = 73,  // as the first LogPiece of record seq, of which the receiver can read `attempt` stretches in the sender's log
};

inline bool is_collective(FrameKind k) { return k >= FrameKind::Enter && k <= FrameKind::StageGo; }
// It says what communicator it is of, to one that has not made it yet.
inline bool is_described(FrameKind k) {
    return k == FrameKind::Vote || k == FrameKind::Freeze || k == FrameKind::AgreeVote || k == FrameKind::RestoreAsk ||
           k == FrameKind::Votes || k == FrameKind::Dispute;
}
inline bool is_spread(FrameKind k) {  // of a communicator; payload: channel/spread.h
    return k == FrameKind::Freeze || k == FrameKind::Decision || k == FrameKind::AgreeResult;
}
inline bool is_p2p(FrameKind k) { return k >= FrameKind::Eager && k <= FrameKind::LogShown; }

struct FrameHeader {
    std::uint32_t length = 0;  // payload bytes that follow
    FrameKind kind = FrameKind::Ping;
    std::uint8_t flags = 0;
    std::uint16_t step = 0;
    std::uint32_t attempt = 0;
    std::uint32_t segment = 0;
    std::uint64_t comm = 0;  // communicator id, 0: job level
    std::uint64_t seq = 0;  // operation number in the communicator, or message number for p2p
    std::uint64_t aux = 0;
    std::uint64_t aux2 = 0;
};
static_assert(sizeof(FrameHeader) == 48 && std::is_trivially_copyable_v<FrameHeader>);

// A segment of a collective, unless the user says otherwise: with its headers it goes through the loopback device and through a network
// card's segmentation offload as one packet, of at most 64 KiB. One that leaves a rest takes half as long again.
inline constexpr std::uint32_t kSegmentBytes = 60u << 10;

// No frame is longer, whatever arrives on a socket: transports refuse (and close) beyond it.
inline constexpr std::uint32_t kMaxFramePayload = 8u << 20;

}  // namespace ftcomm
