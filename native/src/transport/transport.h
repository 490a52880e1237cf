// What the protocol needs from the wires: reliable FIFO frames per peer incarnation, written in place.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/held.h"
#include "channel/frame.h"

namespace ftcomm {

// One per rank. All calls come from the engine, one at a time. Implementations: shm, tcp (mixed by the runtime), sim.
//
// Contract:
// - Frames from one peer incarnation reach Node::on_frame in order, once, whole; a link that breaks and heals loses
//   nothing (tcp: the session layer resumes). A link that stays broken is silence; it is never reported as a death here.
// - `commit` copies or publishes at once: after it the caller may reuse all memory. What was handed to `send_from` is read until the peer has it,
//   or it is taken back.
// - Frames to a peer that is not connected yet are buffered or refused (`reserve` returns nullptr), never lost.
class Transport {
public:
    virtual ~Transport() = default;

    static constexpr std::uint32_t kWholeBytes = 16;  // what is sent from elsewhere is a multiple of that

    // Space for the payload of the next frame to `slot` (16-byte aligned), or nullptr when there is none now; then
    // Node::on_writable(slot) follows when there is. length may be 0 (a non-null pointer comes back).
    virtual std::byte* reserve(int slot, std::uint32_t length) = 0;
    // Sends the reserved frame; header.length is at most what was reserved.
    virtual void commit(int slot, const FrameHeader& header) = 0;

    // Instead of both, where a payload of so many bytes goes to the slot from where it lies. False: as of reserve. A payload that nobody holds
    // (Held::by) is lent: it stays where it is, as it is, until the caller takes it back.
    virtual bool sends_from(int slot, std::size_t bytes) {
        (void)slot, (void)bytes;
        return false;
    }
    virtual bool send_from(int slot, const FrameHeader& header, const Held& payload) {
        (void)slot, (void)header, (void)payload;
        return false;
    }
    // What was lent to the slot, whichever incarnation it was, for frames of this communicator. has_come: the slot has all of it, as the caller
    // knows from what came back.
    virtual void take_back(int slot, std::uint64_t comm, bool has_come) { (void)slot, (void)comm, (void)has_come; }

    // From now on `slot` is this incarnation: sends go to it. Frames of any incarnation keep coming up; the node filters.
    virtual void attach(int slot, std::uint32_t incarnation) = 0;
    // The slot's current incarnation was voted out: stop sending, free what can be freed; nothing it still writes may
    // ever be read again (M9: its memory is never reused).
    virtual void detach(int slot) = 0;

    // Delivers (Node::on_frame, from inside this call) every frame of the slot's current incarnation that has already arrived:
    // a reader drains the channel before it believes in a departure (M10).
    virtual void drain(int slot) { (void)slot; }

    // Whether this rank may read the memory of the slot's current incarnation, and that one ours. An equivalence between
    // incarnations that never changes: all ranks of a set come to the same answer for the set.
    virtual bool shares_memory(int slot) {
        (void)slot;
        return false;
    }
    // Whether frames to the slot go through memory of this host; may also be told where shares_memory is not.
    virtual bool is_near(int slot) { return shares_memory(slot); }
    // Copies `bytes` from address `from` of the slot's process, then looks whether `ticket` still stands at `ticket_at`: the place of a window of
    // that process, and how far into it.
    enum class Read { Done, Over, Refused };  // Over: what was copied is worth nothing; the peer is gone, or further on
    struct Remote {
        std::uint64_t from = 0, ticket_at = 0, ticket = 0;
        // The words of a process that was killed stand for ever, and where its buffer was its successor may have something else.
        bool is_of(std::uint32_t incarnation) const { return (ticket & kOfIncarnation) == (incarnation & kOfIncarnation); }
    };
    static constexpr std::uint64_t kOfIncarnation = 0xffff;  // bits of a ticket
    static std::uint64_t ticket_of(std::uint32_t incarnation, std::uint64_t random) {
        return (random & ~kOfIncarnation) | (incarnation & kOfIncarnation);
    }
    virtual Read read(int slot, const Remote& remote, std::byte* to, std::size_t bytes) {
        (void)slot, (void)remote, (void)to, (void)bytes;
        return Read::Refused;
    }

    // Zeros of this rank's own that the ranks near it can look into, from now on to the end of this incarnation. Its first word is its ticket:
    // it falls when the incarnation is over. The rest of its head is the transport's.
    static constexpr std::size_t kWindowHead = 4096;
    // What is not longer is there as long as the host's memory, whoever has died: others may not have looked at it yet, as at frames on
    // their way.
    static constexpr std::size_t kSmallWindow = 40u << 10;
    struct Window {
        std::byte* memory = nullptr;  // null: there is none
        std::uint64_t place = 0;  // by which others find it
    };
    enum class Room { Any, Kept };  // Kept: also from what is kept for links, without which nobody can do
    virtual Window make_window(std::size_t bytes, Room room) {
        (void)bytes, (void)room;
        return {};
    }
    // The same of the slot's current incarnation, to be read only. Null: it is out of sight.
    virtual const std::byte* look(int slot, std::uint64_t place, std::size_t bytes) {
        (void)slot, (void)place, (void)bytes;
        return nullptr;
    }

    // Words in windows of others that something is to appear in, as this rank has found them last: when one has changed, and is not 0 (it is
    // being written), there is something to look at (Node::look). Until the next call. Who changes one tells those that may be asleep, or have more of them to look at
    // than they look at: nudge, after the change.
    struct Word {
        const std::atomic<std::uint64_t>* at = nullptr;
        std::uint64_t seen = 0;
        bool has_changed() const {
            const auto value = at->load(std::memory_order_seq_cst);
            return value != 0 && value != seen;
        }
    };
    virtual void watch_words(std::span<const Word> words) { (void)words; }
    virtual void nudge(int slot) { (void)slot; }

    // Payloads up to this size are sure to fit an idle link.
    virtual std::uint32_t max_payload() const = 0;
};

}  // namespace ftcomm
