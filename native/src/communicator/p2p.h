// Point-to-point messages of one communicator: FIFO per (source, tag); small ones eagerly, large ones after the receiver agreed.
// Frames are bound to incarnations, not to epochs (M8): a view change loses no message between living ranks.
//
// A large message to a rank that may read this one's memory is shown (p2p_shown.cc): its announcement says where it is, and the
// receiver copies it out of there. No other copy is made, and neither waits for the other in between.
//
// Under the policy replay it carries the messages inside a log group (carry_group): LoggedPairs matches what arrives, and a message to a
// member that is not back yet waits in its sender's buffer.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/ticket_words.h"
#include "communicator/core.h"

namespace ftcomm {

// Of receives, whichever way messages go.
Status message_too_long(std::uint64_t bytes, int src, std::uint64_t capacity);
inline constexpr std::int64_t kAnyTag = std::numeric_limits<std::int64_t>::min();
Status no_message(int src, std::int64_t tag);  // in time

class PointToPoint {
public:
    PointToPoint(Core& core, const CommSpec& spec, int rank) : core_(core), spec_(spec), rank_(rank) {}

    void send(const RequestPtr& request, const void* data, std::uint64_t bytes, int dst, std::int64_t tag, Time deadline);
    void recv(const RequestPtr& request, void* data, std::uint64_t bytes, int src, std::int64_t tag, Time deadline);
    void on_frame(int from, const FrameHeader& header, ByteView payload);
    void on_writable(int slot);
    void on_tick(Time now);
    // `gone`: communicator ranks that are out of the view or have left; `acked`: those whose failure the user knows of.
    void on_failures(const RankSet& gone, const RankSet& acked, const std::map<int, Evidence>& evidence);
    // Slots of `came` get new incarnations: numbering starts again. The rest as for on_failures.
    void replaced(const RankSet& came, const RankSet& gone, const RankSet& acked, const std::map<int, Evidence>& evidence);
    void fail_all(const Status& status);
    void forget_arrived() { arrived_.clear(); }  // and not received: nobody will
    void halt();  // nobody reads a buffer any more, and none is written to; no request is finished
    bool cancel(const RequestPtr& request);  // a receive that has not matched, a send that nobody takes yet
    bool waits_for(int rank) const;
    bool idle() const { return sends_.empty() && recvs_.empty(); }
    bool has_small_sends() const;  // that need nothing but room
    bool work();  // reads some of what is shown; true: there is more

    struct Arrived {  // unexpected
        int src;
        std::int64_t tag;
        std::uint64_t number, bytes;
        bool large;
        Bytes data = {};  // of one that is not large; the rest of it is on its way
        Transport::Remote shown = {};  // a ticket of 0: it is not
    };
    // Inside a log group.
    struct Group {
        std::function<bool(int rank)> is_back;
        std::function<void(Arrived)> arrived;
        std::function<void(Status)> not_received;  // a send whose time is over
    };
    void carry_group(Group group) { group_ = std::move(group); }
    // `a` goes to this receive; true: it is finished.
    bool receive(const RequestPtr& request, void* data, std::uint64_t capacity, const Arrived& a);
    void on_back();  // somebody may be back: what waited for it goes out
    void on_left(int rank);  // it receives no more
    void postpone(Time deadline);  // of every send that waits: not before then

private:
    struct Send {  // a message that waits for room or for the receiver, or is under way
        RequestPtr request;
        const std::byte* data;
        std::uint64_t bytes, done = 0, number;
        int dst;
        Time deadline;
        std::uint32_t frame = 0;  // bytes, at most
        bool small = false;  // it does not wait for its receive
        bool unsent = false;  // its first frame has found no room, or one to the same rank before it
        bool open = false;  // the receiver wants it sent, or it is small
        bool is_read = false;  // or reads it
        bool cancelled = false;
        std::int64_t tag = 0;
        bool waits = false;  // for the receiver to be back: nothing of it has been sent
        bool shown = false;  // or was
        std::unique_ptr<ReadTicket> ticket = nullptr;  // until it is received, or not shown any more
    };
    struct Recv {
        RequestPtr request;
        std::byte* data;
        std::uint64_t capacity;
        int src;
        std::int64_t tag;
        Time deadline;
        int matched = -1;  // source of a large message under way
        std::uint64_t number = 0, bytes = 0, done = 0;
        Transport::Remote shown = {};  // as long as it is read
    };
    using Sends = std::list<Send>;
    FrameHeader header(FrameKind kind, std::uint64_t number) const;
    int slot_of(int rank) const { return spec_.members[static_cast<std::size_t>(rank)]; }
    bool match_arrived(Recv& r);  // true: r is finished
    bool match_again(Recv& r);  // the same
    bool take(Recv& r, const Arrived& a, ByteView data);
    void arrived(Arrived a, ByteView data = {});  // `data`: what of it there is
    void on_data(int from, const FrameHeader& h, ByteView payload);
    // Of a receive, to the sender of a large message: flags of Cts.
    enum Answer : std::uint8_t { kSendIt = 0, kReceived = 1, kReading = 2 };
    void answer(int rank, std::uint64_t number, Answer what);
    void give_up(int rank, std::uint64_t number);  // the rest of a message does not come
    bool begin(Send& s);  // true: it is finished
    bool send_first(Send& s);  // false: there is no room
    bool show(Send& s, const FrameHeader& h);
    bool is_late(const Send& s, Time now) const;
    void drain_late(Time now);
    bool can_read(const Recv& r) const;
    static Transport::Remote shown_by(ByteView payload);
    Sends::iterator end(Sends::iterator it, Status status);
    bool read(Recv& r);  // a piece; true: r is finished
    void pump(Send& s);
    void sweep();
    Status gone_status(const RankSet& ranks) const;
    void check_alarms();

    Core& core_;
    const CommSpec& spec_;
    int rank_;
    std::map<int, std::uint64_t> next_number_;  // per destination
    Sends sends_;
    RankSet stuck_;  // destinations of unsent ones
    std::list<Recv> recvs_;
    std::deque<Arrived> arrived_;
    RankSet gone_, acked_;
    RankSet left_;  // of those gone: in good order
    std::map<int, Evidence> evidence_;
    std::optional<Group> group_;
};

}  // namespace ftcomm
