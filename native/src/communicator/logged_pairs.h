// Messages of a communicator under the policy replay: each is a record of its pair's log before anybody may see it, and is delivered
// exactly once, in order per (source, tag), however often either side dies and starts again. (Pairwise commit logs: Grover and
// Rajagopal 2022, 3.4; here the record in the log is the message itself.)
//
// A send is done when its record is in the log, or between hosts, where logging may be late, in this process's memory on its way there (see
// channel/late_log.h): the receiver may be dead, or not born yet. A sender that runs again compares what it
// sends with what is there already and sends nothing (L1). A receiver that runs again reads the same records in the same order. On one host
// it reads them where they are. From another one the sender streams them, from the record that the receiver asks for, and the receiver
// keeps a half of its own: what has arrived there outlives the sender's host, and its own process.
//
// Messages inside a log group (JobView::groups) are in no log: PointToPoint carries them, from buffer to buffer, and they are matched here
// with the others, so that a receive from ANY may get either. When a member dies the whole group starts again (G1), and its members say
// the same to each other again. Which source a receive from ANY got is on record in any case: what it led to may have left the group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "channel/phased_log.h"
#include "collectives/records.h"
#include "communicator/core.h"
#include "communicator/p2p.h"

namespace ftcomm {

inline constexpr std::uint64_t kRestored = ~std::uint64_t{0};  // in place of a mark: a lost log has been had again (restore.h)

class LoggedPairs {
public:
    // A communicator has two sets of streams, whose orders do not depend on each other: the program's messages, and those of LoggedRing.
    enum class Channel : std::uint8_t { Messages = 0, Ring = 1 };
    // replaying: what a process before has done is still being done again; caught_up: called when that turns out to be over. log_since:
    // see Decision. direct: carries messages inside the log group; null: all are logged.
    LoggedPairs(Core& core, const CommSpec& spec, int rank, Channel channel, PhasedLog& log,
                const std::vector<std::uint32_t>& log_since, const bool& replaying, std::function<void()> caught_up,
                PointToPoint* direct = nullptr);
    // In the log: of a stream from one slot to another.
    static LogKey key(const CommSpec& spec, Channel channel, int src, int dst);

    // deadline: inside the log group; otherwise a send waits for nobody.
    void send(const RequestPtr& request, const void* data, std::uint64_t bytes, int dst, std::int64_t tag, Time deadline = 0);
    // The same with a payload that is made in the log, as Log::append_made says.
    void send_made(const RequestPtr& request, std::uint64_t bytes, int dst, std::int64_t tag, const Log::Make& make);
    // The newest record that was received: not checked, and there until something else is appended or received.
    Status received(int src, LogRecord* out) { return log_.peek(from(src), peer(src).taken, out); }
    Status check_received(int src);
    // data null: only received() has it. tag: kAnyTag, in the ring, for whatever comes next.
    void recv(const RequestPtr& request, void* data, std::uint64_t bytes, int src, std::int64_t tag, Time deadline);
    void on_frame(int from, const FrameHeader& header, ByteView payload);
    std::byte* place(int from, const FrameHeader& header);  // Node::place, of a LogPiece
    void on_writable(int slot);
    bool work();  // a piece of what goes out in no caller's time; true: there is more
    void on_tick(Time now);
    void postpone(Time deadline);  // of every receive that waits: not before then
    void on_view();  // somebody is out, or back: who is back learns how far this rank's streams go
    void fail_all(const Status& status);
    bool cancel(const RequestPtr& request);
    bool waits_for(int rank) const;
    bool idle() const { return recvs_.empty(); }
    bool is_direct(int rank) const { return direct_ != nullptr && core_.view.same_group(core_.self(), slot_of(rank)); }
    // Where the program is in its streams, by rank: what it has sent, and received (of what its log holds: a process that runs again
    // has more before it). quiet: no receive waits.
    struct Position {
        std::vector<std::uint64_t> sent, received;
        std::uint64_t answers = 0;  // on record
        bool quiet = true;
        bool same_messages(const Position& other) const { return sent == other.sent && received == other.received; }
    };
    Position position() const;
    // By rank, messages that are still to be received, and of which a later one has been received, as may be between checkpoints: the
    // position's `received` are the first ones but for these.
    using Left = std::vector<std::vector<std::uint64_t>>;
    Left left() const;
    void go_to(const Position& position, const Left& left = {});
    void count_anew(std::uint64_t mark) {  // answers are numbered from mark to mark: what counts them need not grow for ever
        mark_ = mark;
        asked_.clear();
        for (auto& p : peers_) p.refused = 0;
    }
    // A send has found no room, and none to the same rank has been done since.
    bool has_refused() const {
        return std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.refused > 0; });
    }
    // What count_anew() has counted since, so that another process can count on: by source and tag, the receives.
    struct Asks {
        int src;
        std::int64_t tag;
        std::uint64_t count;
    };
    std::vector<Asks> asks() const;
    void count_on(const std::vector<Asks>& asks);
    // The program is there now, for people who read the log. No micro-batch: the nth message to each rank from now on is of the nth.
    void set_position(std::uint64_t iteration, std::optional<std::uint32_t> micro_batch);
    void on_resume_point();  // this process is the first to be there
    void collect(const Position& position);  // L3: by each end's own position at its checkpoint
    std::uint64_t replayed() const { return replayed_; }  // sends that were in the log already
    // While it is on, the program does not compute what it sends: it goes through the sends of a process before it, whose messages are
    // there. A send that is in the log is compared by tag and size only; one that is not has no content, and is refused.
    void set_hollow(bool on) { hollow_ = on; }
    // By rank, what the log has and this process has not done again yet: its own sends, and what came for it.
    struct Ahead {
        std::vector<std::uint64_t> sends, receives;
    };
    Ahead ahead();
    // A message that this rank, or one before it, has sent, with its checksum: what a computation elsewhere is compared with.
    Status logged(int dst, std::uint64_t seq, LogRecord* out);
    // That a rank was given answers which are in its log only: before the resume point; since the newest mark where it was.
    struct Heard {
        bool early = false;
        std::uint64_t newest = 0;
        bool add(std::uint64_t mark) {  // false: it says so already
            if (mark == 0) return !std::exchange(early, true);
            if (mark <= newest) return false;
            newest = mark;
            return true;
        }
    };
    Heard heard_of(int rank) const { return heard_[static_cast<std::size_t>(rank)]; }
    void forget_heard(std::uint64_t before);  // of marks that nobody goes back to
    void forget_answers(std::uint64_t before);  // the same

private:
    static constexpr std::uint8_t kFirstPiece = 1, kSummedPiece = 2;  // flags of a LogPiece
    static constexpr int kAllPieces = -1;
    static constexpr int kSend = -2;  // in place of a receive's source
    struct Recv {
        RequestPtr request;
        std::byte* data;
        std::uint64_t capacity;
        int src;
        std::int64_t tag;
        Time deadline;
        std::uint64_t number;  // among the receives from that source (or ANY) with that tag
        bool any, answered = false;
    };
    // What a receive was told that another run of it might not be told: who answered ANY, or that it was given up (L5). Receives are told
    // apart by source and tag, so that threads which receive different tags need not take turns. The same for a send for which the
    // log had no room: src kSend - receiver, tag how many such sends of this message there were before, number the message's.
    struct Asked {
        std::uint64_t mark;
        int src;
        std::int64_t tag;
        std::uint64_t number;
        auto operator<=>(const Asked&) const = default;
    };
    struct Answer {
        int source = -1;
        std::optional<Cause> failure;
    };
    struct Message {  // a record that nobody has received
        std::uint64_t seq;
        std::int64_t tag;
        std::uint64_t bytes;
        std::unique_ptr<PointToPoint::Arrived> direct{};  // in no log
    };
    struct Peer {
        std::uint64_t sent = 0;  // by the program, since it started
        std::int64_t refused = 0;  // sends of the message after that, for which the log had no room
        std::uint64_t seen = 0;  // records of its stream to this rank that are in `waiting` or received
        std::deque<Message> waiting;
        std::uint64_t taken = 0;  // by the program
        std::uint32_t told = ~0u;  // incarnation that knows how far the stream to it goes
        std::uint32_t in_iteration = 0;  // messages to it
        bool met = false;  // it and this rank have been in together
        // Another host: to it, and from it.
        std::uint64_t wanted = 0, wanted_offset = 0;  // the next record that it wants; 0: it has not asked
        bool later = false;  // work() goes on with its stream
        std::uint32_t asked = ~0u;  // incarnation that has been asked for its records
        std::uint64_t open = 0;  // the record that is coming: its first piece is in this host's half; 0: none
        std::uint64_t arrived = 0;  // so many bytes of it,
        RequestPtr into;  // and the receive that gets its pieces as they come,
        std::byte* into_data = nullptr;  // there; if it is done before, it got none
        // On this host: the newest LogShown, and the checksum of the `arrived` bytes that were copied out of the sender's log.
        FrameHeader shown{};
        std::uint32_t shown_crc = 0;
        bool early = false;  // records from behind the resume point have come before this rank was there
    };

    int slot_of(int rank) const { return spec_.members[static_cast<std::size_t>(rank)]; }
    Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
    const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
    LogKey to(int rank) const { return key(spec_, channel_, core_.self(), slot_of(rank)); }
    LogKey from(int rank) const { return key(spec_, channel_, slot_of(rank), core_.self()); }
    FrameHeader header(FrameKind kind) const;
    bool reachable(int rank) const { return core_.view.members[static_cast<std::size_t>(slot_of(rank))].alive && rank != rank_; }
    std::uint32_t incarnation(int rank) const { return core_.view.members[static_cast<std::size_t>(slot_of(rank))].incarnation; }

    int log_age(int rank) const;
    LogPosition next_position(int dst);
    bool was_sent(int dst) { return peer(dst).sent < log_.last(to(dst)); }
    void send_again(const RequestPtr& request, ByteView payload, int dst, std::int64_t tag);
    bool may_send(const RequestPtr& request);
    void is_sent(int dst, bool held);
    // Of a large message that is shown while it is logged: a frame each, 64 at most. One of less than five is there before its receiver is
    // awake.
    std::uint64_t stretch(std::uint64_t bytes) const { return std::max(4 * core_.config.eager_limit + 64, bytes / 64 + 1); }
    Status log_shown(ByteView payload, int dst, std::int64_t tag);
    Status log(const RequestPtr& request, ByteView payload, int dst, std::int64_t tag, bool* held);
    Status compare(const LogRecord& record, ByteView data, std::int64_t tag, int dst) const;
    Status no_content(int dst) const;
    void mark(int rank);
    void want(int rank);
    bool stream(int rank, int pieces);
    std::uint32_t next_piece(int rank, std::uint64_t bytes) const;
    bool send_piece(int rank, LogRecord record);
    bool find_to_send(const LogKey& key, LogRecord* record);
    Status log_streamed(ByteView payload, int dst, std::int64_t tag);
    void begin_message(int rank, const FrameHeader& header);
    void on_piece(int rank, const FrameHeader& header, ByteView payload);
    void on_shown(int rank, const FrameHeader& header);
    void follow(int rank);
    bool copy_rest(Recv& recv, int src, std::uint64_t seq);
    void end_message(int rank, const FrameHeader& header, std::uint32_t crc);
    void look(int rank);  // what is new in its stream
    void on_direct(PointToPoint::Arrived message);
    void match();
    void end_hopeless();
    bool match_one(Recv& recv);  // true: it is finished
    bool take(Recv& recv, int src, std::deque<Message>::iterator message);
    Asked asked(const Recv& recv) const { return {mark_, recv.any ? -1 : recv.src, recv.tag, recv.number}; }
    Asked asked(int dst) const { return {mark_, kSend - dst, peer(dst).refused, peer(dst).sent + 1}; }
    Status remember(const Recv& recv, const Answer& answer);
    Status remember(const Asked& asked, const Answer& answer);
    bool refused_before(const RequestPtr& request, int dst);
    void refuse(const RequestPtr& request, int dst, Status status);
    void give_up(const Recv& recv, Status status);
    void read_answers();
    void tell_answered(int rank, std::uint64_t mark);
    void read_heard();
    void on_answered(int rank, std::uint64_t mark);
    void broke(Status status);

    Core& core_;
    const CommSpec& spec_;
    int rank_;
    const Channel channel_;
    PhasedLog& log_;
    const std::vector<std::uint32_t>& log_since_;
    const bool& replaying_;
    const std::function<void()> caught_up_;
    PointToPoint* const direct_;
    std::vector<Peer> peers_;
    std::list<Recv> recvs_;
    std::map<Asked, Answer> answers_;  // of the processes before
    std::map<std::pair<int, std::int64_t>, std::uint64_t> asked_;  // receives since the mark, by source and tag
    std::uint64_t mark_ = 0;
    Heard told_;  // what the others are to know of this rank
    std::vector<Heard> heard_;  // by rank
    std::uint64_t replayed_ = 0;
    bool hollow_ = false;
    std::uint64_t iteration_ = 0;
    std::optional<std::uint32_t> micro_batch_ = 0;
    Status broken_;  // the log cannot be read on
};

}  // namespace ftcomm
