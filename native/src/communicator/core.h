// What the parts of a node share: configuration, ports, the job view, the clock of the current input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "base/shared_writer.h"
#include "channel/sender.h"
#include "channel/spread.h"
#include "collectives/ticket_words.h"
#include "communicator/node.h"
#include "membership/cell_client.h"
#include "membership/rules.h"
#include "membership/view.h"

namespace ftcomm {

class Communicator;

struct Core {
    Core(NodeConfig c, Transport& t, Authority& a, NodeHost& h, Time start)
        : config(std::move(c)),
          rules(Rules::without(config.mutations)),
          transport(t),
          sender(t, config.stream_limit, config.paces_streams, config.quick),
          cells(a, config.boot, rules),
          host(h),
          now(start),
          random(config.seed),
          tickets(t),
          shared(config.streams(), config.goes_round) {}

    const NodeConfig config;
    const Rules rules;
    Transport& transport;
    Sender sender;
    CellClient cells;
    NodeHost& host;
    Time now;
    Random random;

    JobView view;
    Bytes view_bytes;          // the head as last known: what the next compare-and-set expects
    bool stale = false;        // voted out
    bool authority_lost = false;
    bool admitting = false;    // between an admit vote and its decision: no operation starts (M13)
    bool solo = false;         // a replacement that is not admitted yet
    bool wants_view = false;   // something arrived from after a view change that has not come here
    Bytes scratch;             // of runs, within one input
    std::vector<Transport::Window> windows;  // that no run uses
    std::vector<Transport::Window> boards;  // that no communicator uses
    TicketWords tickets;  // of this rank's memory
    SharedWriter shared;  // writes to those in use
    std::vector<Communicator*> lookers;  // whose runs look at what others show
    bool words_changed = false;  // those that they watch, perhaps
    bool has_work = false;     // some run may have work that waits for no frame
    Status gives_up;           // replay: why this rank is about to take itself out of the view, or ok
    Status abandoned;          // replay: a replacement that nobody is left to let in, or a log that cannot be read
    int agreements = 0;        // replay: checkpoints that are being committed, in all communicators
    // Replay: communicators without a resume point that have been used, and how many resume points there were in others at their last use.
    struct Unmarked {
        std::string name;
        std::uint64_t used;
    };
    std::map<CommId, Unmarked> unmarked;
    std::uint64_t resumes = 0;
    // Replay: an operation is complete here that no process of this slot before this one has returned from. What the program
    // makes from now on none of them had.
    bool beyond_others = false;
    RankSet may_leave;  // slots that want to, and have heard from this rank that they may
    RankSet left;  // slots that said goodbye (not necessarily out of the view yet)

    int self() const { return config.slot; }
    // Bytes from one rank to another that the receiver reads where it can; a copy through the ring is as fast below.
    std::uint64_t read_limit() const { return config.pull_limit > 0 ? config.pull_limit : 32u << 10; }
    // Whether a message to a rank that can read it here is read. Where ranks share processors the link's two copies take turns: then the one
    // of a read is faster, unless it is of what is in no cache, and the link's are.
    bool shows(std::uint64_t bytes) const {
        constexpr std::uint64_t kMost = 8u << 20;
        constexpr int kFew = 4;  // ranks: with eight the link's copies of that take 1.1 to 1.5 times as long
        const bool few = config.paces_streams && config.world_size <= kFew;
        if (config.pull_limit == 0 && config.streams() && (config.own_processor || (few && bytes >= kMost))) return false;
        return bytes >= read_limit();
    }
    std::uint64_t fresh_ticket() {  // C9: no ticket is 0
        std::uint64_t ticket = 0;
        while (ticket == 0) ticket = Transport::ticket_of(config.incarnation, random());
        return ticket;
    }
    bool in_view(int slot, std::uint32_t incarnation) const { return view.is_alive(slot, incarnation); }
    // Who passes a record on, and to whom. M15: those who have been here longer come first. A rank that lags behind by a view or two may not
    // know who came in with them, and has no link to it; it knows all who were here before itself. Last, who has left: it may have ended.
    std::vector<int> passing_order(const RankSet& slots) const {
        auto order = slots.list();
        const auto place = [this](int s) {
            return std::pair(left.has(s) || may_leave.has(s), view.members[static_cast<std::size_t>(s)].admission);
        };
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return place(a) < place(b); });
        return order;
    }
    template <class After>
    void spread_record(const FrameHeader& header, ByteView record, const RankSet& slots, const After& after_each) {
        for (const auto& frame : spread(record, passing_order(slots), config.spread_degree)) {
            sender.send_long(frame.slot, header, frame.payload);
            after_each();
        }
    }
    void tell(int slot, const FrameHeader& header, ByteView record) {  // who tells nobody else
        sender.send_long(slot, header, spread_to_one(record));
    }
    void tell_view(int slot) {  // the one that this rank has
        FrameHeader h;
        h.kind = FrameKind::View;
        tell(slot, h, view_bytes);
    }
    // L5: whoever sees what this rank puts in has heard what its receives were told (LogAnswered, on the links), as nobody has to be.
    bool all_logs_are_here() {
        if (config.log == nullptr) return true;
        if (logs_epoch_ != view.epoch) {
            logs_epoch_ = view.epoch;
            logs_are_here_ = true;
            for (int s = 0; s < config.world_size; ++s) logs_are_here_ &= config.log->readable(s);
        }
        return logs_are_here_;
    }
    bool at_dead_end() const { return stale || authority_lost || !abandoned; }
    Status dead_end() const {  // why nothing can go on, or ok
        if (!at_dead_end()) return {};
        if (stale && !gives_up) return gives_up;
        if (stale && view.members[static_cast<std::size_t>(self())].evidence == Evidence::Group) {
            auto s = Status::error(Code::StaleEpoch,
                                   "one of this rank's log group died: the group's messages are in no log, so all of "
                                   "it start again together (ftrun does that)");
            s.evidence = {Evidence::Group};
            s.ranks = {self()};
            s.epoch = view.epoch;
            return s;
        }
        if (stale) {
            auto s = Status::error(Code::StaleEpoch, "this rank was voted out of the job at epoch " + std::to_string(view.epoch) +
                                                         " (it was silent or unreachable); start it again as a replacement");
            s.epoch = view.epoch;
            return s;
        }
        if (authority_lost)
            return Status::error(
                Code::NoAuthority,
                "the job's authority (the store that holds the head cell) is lost, so no failure can be decided; "
                "restart the job, and keep the store where it outlives the ranks");
        return abandoned;
    }
    // A caller that has seen the end of its request, and holds it alone, may give its memory to the next one.
    void reuse(RequestPtr request) { spare_request_ = std::move(request); }
    RequestPtr fresh_request() {
        if (spare_request_ == nullptr) return std::make_shared<Request>();
        spare_request_->begin();
        return std::move(spare_request_);
    }
    void finish(const RequestPtr& request, Status status) {
        if (request->done.load(std::memory_order_relaxed)) return;
        request->status = std::move(status);
        request->done.store(true, std::memory_order_release);
        host.completed(request);
    }
    void event(NodeEvent e) {
        e.epoch = view.epoch;
        host.event(e);
    }

private:
    RequestPtr spare_request_;
    std::uint64_t logs_epoch_ = 0;  // of logs_are_here_
    bool logs_are_here_ = false;
};

}  // namespace ftcomm
