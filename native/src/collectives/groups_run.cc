// Large all-reduce over several hosts. Ranks that can read each other's memory form a group; each segment crosses from group to group
// once in each direction, whatever the number of ranks in them:
//
//   - in each group one rank, the segment's delegate, adds up the inputs of its group, which it reads where they are;
//   - the delegates send these sums to the segment's owner (the delegate of its own group), which adds them, in the groups' order;
//   - the owner sends the final to the delegates, and the other ranks of each group read it there.
//
// Where nobody has a fellow it is the ring: with a delegate for each rank, an owner would have to keep the sums of all others. The same
// plans as the ring, repairs included. Reduction on two levels: Parsons and Pai 2014.
//
// As in pull_run.cc a read counts only if the peer's ticket still stands after it (C9).
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/run.h"
#include "collectives/ticket_words.h"

namespace ftcomm {

namespace {

constexpr std::uint32_t kWindow = 64;  // sums under way from one delegate to one owner: bounds what an owner may have to keep
constexpr std::uint32_t kAnnounce = 4;  // segments

struct GroupEntry {  // payload of GroupEnter
    std::uint64_t input = 0, result = 0;  // addresses of segment 0
    std::uint64_t ticket_at = 0, ticket = 0;
    std::uint64_t group = 0;  // the lowest job slot among those that share memory with this rank, itself included
};

class GroupsRun final : public Run {
public:
    GroupsRun(RunEnv env, OpState& op, std::vector<SegmentRun> plan, bool fence, std::uint64_t ticket)
        : env_(std::move(env)),
          op_(op),
          plan_(std::move(plan)),
          ticket_(*env_.tickets, ticket),
          peers_(env_.living.size()),
          owners_(env_.living.size()),
          want_fence_(fence),
          fence_(env_, op_) {}

    void start() override {
        FT_CHECK(op_.shape.kind == OpKind::AllReduce, "%s by groups", op_.shape.text().c_str());
        ticket_.issue();
        GroupEntry mine{address(op_.input(0)), address(op_.result(0)), ticket_.place(), ticket_.number(), 0};
        auto lowest = slot_at(env_.position);
        for (int i = 0; i < env_.size(); ++i)
            if (i != env_.position && env_.memory->shares_memory(slot_at(i))) lowest = std::min(lowest, slot_at(i));
        mine.group = static_cast<std::uint64_t>(lowest);
        FT_POINT("group.enter");
        for (int i = 1; i < env_.size(); ++i)
            env_.sender.send(slot_at(env_.position + i), env_.header(FrameKind::GroupEnter, op_), bytes_of(mine));
        enter(env_.position, mine);
    }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        const int at = env_.position_of(from);
        if (at < 0) return;
        if (h.kind == FrameKind::GroupEnter) {
            GroupEntry entry;
            FT_CHECK(payload.size() == sizeof entry, "rank %d enters with %zu bytes", from, payload.size());
            std::memcpy(&entry, payload.data(), sizeof entry);
            enter(at, entry);
        } else if (h.kind == FrameKind::PullEnter) {
            mismatch = true;  // it was called with another algorithm there
        } else if (!prepared_) {  // its sender knew that all have entered; here the news is still under way
            early_.push_back({from, h, Bytes(payload.begin(), payload.end())});
        } else {
            take(from, at, h, payload);
        }
        check_data();
    }

    bool has_work() const override {
        if (ring_ != nullptr || !prepared_ || over_) return false;
        return next_owner() >= 0 || !to_hand_out_.empty() || source() >= 0;
    }

    void work() override {
        if (!has_work()) return;
        if (const int at = next_owner(); at >= 0) send_sum(at);  // others wait for it
        else if (!to_hand_out_.empty()) hand_out_held();
        else if (const int from = source(); from >= 0) fetch(from);
        check_data();
    }

    bool done() const override {
        if (ring_ != nullptr) return ring_->done();
        return prepared_ && remaining_ == 0 && (!want_fence_ || fence_.done());
    }
    bool all_have_come() const override { return ring_ != nullptr ? ring_->all_have_come() : want_fence_ && fence_.done(); }
    const char* phase() const override {
        if (ring_ != nullptr) return ring_->phase();
        return !prepared_ ? "the others to enter" : remaining_ > 0 ? "data" : "the completion fence";
    }

private:
    struct Peer {
        GroupEntry entry;
        bool entered = false;
        std::size_t group = 0;
        std::vector<std::uint32_t> segments;  // of a rank of the own group: those to be read there, in the plan's order
        std::uint32_t ready = 0, next = 0;  // so many of them are final there, are here
    };
    struct Owner {  // where sums of this rank go
        std::deque<std::uint32_t> segments;
        std::uint32_t under_way = 0;  // sent, and their finals are not back
    };
    struct Early {
        int from;
        FrameHeader header;
        Bytes payload;
    };

    static std::uint64_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }
    static ByteView bytes_of(const GroupEntry& entry) { return std::as_bytes(std::span(&entry, 1)); }
    int slot_at(int position) const { return env_.slot_of(env_.rank_at(position)); }
    const SegmentRun& plan_of(std::uint32_t s) const { return plan_[run_of_[s]]; }
    const std::vector<int>& fellows() const { return groups_[own_]; }
    std::size_t group_of(int at) const { return peers_[static_cast<std::size_t>(at)].group; }
    bool foreign(int at) const { return group_of(at) != own_; }
    // Neighbouring segments belong to one owner: they go to all of the others in turn.
    int delegate(std::size_t group, std::uint32_t s) const { return groups_[group][s % groups_[group].size()]; }

    Bytes& room(std::size_t bytes) {
        if (env_.scratch->size() < bytes) env_.scratch->resize(bytes);
        return *env_.scratch;
    }

    void enter(int at, const GroupEntry& entry) {
        auto& peer = peers_[static_cast<std::size_t>(at)];
        FT_CHECK(!peer.entered, "position %d enters twice", at);
        peer.entry = entry;
        peer.entered = true;
        if (++entered_ == env_.size()) prepare();
    }

    void prepare() {
        std::map<std::uint64_t, std::vector<int>> groups;
        for (int at = 0; at < env_.size(); ++at) groups[peers_[static_cast<std::size_t>(at)].entry.group].push_back(at);
        for (auto& [number, members] : groups) {
            for (int at : members) peers_[static_cast<std::size_t>(at)].group = groups_.size();
            groups_.push_back(std::move(members));
        }
        prepared_ = true;
        if (groups_.size() == peers_.size()) {
            ring_ = make_ring_run(env_, op_, plan_, want_fence_);
            ring_->start();
            take_early();
            return;
        }
        own_ = group_of(env_.position);
        run_of_.reserve(op_.grid.segments());
        handled_.resize(op_.grid.segments());
        for (std::size_t i = 0; i < plan_.size(); ++i)
            for (std::uint32_t k = 0; k < plan_[i].count; ++k) {
                run_of_.push_back(static_cast<std::uint32_t>(i));
                prepare(static_cast<std::uint32_t>(run_of_.size()) - 1, plan_[i]);
            }
        FT_CHECK(run_of_.size() == op_.grid.segments(), "plan covers %zu of %u segments", run_of_.size(), op_.grid.segments());
        announce();
        take_early();
    }

    void take_early() {
        for (auto& e : std::exchange(early_, {})) take(e.from, env_.position_of(e.from), e.header, e.payload);
    }

    void take(int from, int at, const FrameHeader& h, ByteView payload) {
        if (ring_ != nullptr) {
            ring_->on_frame(from, h, payload);
            mismatch |= ring_->mismatch;
            return;
        }
        switch (h.kind) {
            case FrameKind::GroupReady: peers_[static_cast<std::size_t>(at)].ready = h.segment; return;
            case FrameKind::GroupSum:
            case FrameKind::GroupFinal: on_data(at, h, payload); return;
            case FrameKind::Fence: fence_.on_frame(h); return;
            case FrameKind::Enter: mismatch = true; return;  // as above
            default: return;
        }
    }

    void prepare(std::uint32_t s, const SegmentRun& r) {
        if (r.mode != SegmentMode::Reduce && r.mode != SegmentMode::Gather) return;  // all have it
        const int from = env_.position_of(r.rank);
        FT_CHECK(from >= 0, "the plan names rank %d, which is not alive", r.rank);
        if (r.mode == SegmentMode::Reduce)
            FT_CHECK(r.contributors == RankSet::of(env_.living), "a sum over %s among %s", r.contributors.text().c_str(),
                     RankSet::of(env_.living).text().c_str());
        const int here = foreign(from) ? delegate(own_, s) : from;  // where this group has the final first
        if (here != env_.position) {
            peers_[static_cast<std::size_t>(here)].segments.push_back(s);
            ++remaining_;
            return;
        }
        shown_.push_back(s);
        if (r.mode == SegmentMode::Gather && from == env_.position) {
            FT_CHECK(op_.label(s) == LabelKind::Final, "asked to hand out segment %u without having it", s);
            handled_[s] = true;
            if (groups_.size() > 1) to_hand_out_.push_back(s);
            return;
        }
        ++remaining_;
        if (r.mode == SegmentMode::Reduce && from != env_.position) owners_[static_cast<std::size_t>(from)].segments.push_back(s);
        FT_CHECK(from != env_.position || groups_.size() > 1, "one group: that is for pull");
    }

    void on_data(int at, const FrameHeader& h, ByteView payload) {
        const auto s = h.segment;
        FT_CHECK(s < op_.grid.segments() && payload.size() == op_.segment_bytes(s), "segment %u with %zu bytes", s,
                 payload.size());
        if (over_) return;
        if (h.kind == FrameKind::GroupSum) on_sum(at, s, payload);
        else on_final(s, payload);
    }

    // The owner: when the last group's sum is here.
    void on_sum(int at, std::uint32_t s, ByteView payload) {
        const auto& r = plan_of(s);
        FT_CHECK(r.mode == SegmentMode::Reduce && r.rank == env_.rank && foreign(at), "a sum of segment %u for another", s);
        auto& sums = sums_[s];
        FT_CHECK(sums.count(group_of(at)) == 0, "two sums of a group for segment %u", s);
        if (sums.size() + 2 < groups_.size()) {
            sums.emplace(group_of(at), Bytes(payload.begin(), payload.end()));
            return;
        }
        const auto bytes = payload.size();
        const auto* own = sum_of_group(s, nullptr);
        if (own == nullptr) return;
        // Always in the groups' order, whoever came first. Only the last addition writes to the caller's buffer, when all that can
        // fail has been done (invariant B).
        auto* sum = second_half(bytes);
        const auto& d = op_.desc;
        const std::byte* so_far = nullptr;
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            const auto* next = g == own_ ? own : g == group_of(at) ? payload.data() : sums.at(g).data();
            const bool last = g + 1 == groups_.size();
            const auto divisor = last && d.op == ReduceOp::Avg ? static_cast<std::uint32_t>(env_.size()) : 1;
            auto* to = last ? op_.result(s) : sum;
            if (so_far != nullptr) reduce(d.dtype, d.op, to, so_far, next, op_.grid.count(s), divisor);
            so_far = so_far == nullptr ? next : to;
        }
        sums_.erase(s);
        op_.set_final(s, r.contributors);
        FT_POINT("group.owner");
        hand_out(s);
        handled(s);
    }

    void hand_out(std::uint32_t s) {
        auto h = env_.header(FrameKind::GroupFinal, op_);
        h.segment = s;
        for (std::size_t g = 0; g < groups_.size(); ++g)
            if (g != own_) env_.sender.send_stable(slot_at(delegate(g, s)), h, ByteView(op_.result(s), op_.segment_bytes(s)));
    }

    void hand_out_held() {
        hand_out(to_hand_out_.front());
        to_hand_out_.pop_front();
    }

    void on_final(std::uint32_t s, ByteView payload) {
        const auto& r = plan_of(s);
        const int from = env_.position_of(r.rank);
        FT_CHECK(foreign(from) && delegate(own_, s) == env_.position && !handled_[s], "a final of segment %u for another", s);
        if (op_.label(s) != LabelKind::Final) copy_bytes(op_.result(s), payload.data(), payload.size());
        op_.set_final(s, r.contributors);
        if (r.mode == SegmentMode::Reduce) --owners_[static_cast<std::size_t>(from)].under_way;
        FT_POINT("group.final");
        handled(s);
    }

    void handled(std::uint32_t s) {
        handled_[s] = true;
        --remaining_;
        announce();
    }

    // To the fellows: how many of the segments that they read here are final.
    void announce() {
        if (fellows().size() == 1) return;
        auto n = shown_ready_;
        while (n < shown_.size() && handled_[shown_[n]]) ++n;
        if (n == shown_ready_ || (n < shown_.size() && n - shown_ready_ < kAnnounce)) return;
        shown_ready_ = n;
        auto h = env_.header(FrameKind::GroupReady, op_);
        h.segment = static_cast<std::uint32_t>(n);
        for (int at : fellows())
            if (at != env_.position) env_.sender.send(slot_at(at), h);
        FT_POINT("group.ready");
    }

    // The owner whose sums this rank sends next, starting behind ourselves: not all at the same one.
    int next_owner() const {
        for (int i = 1; i <= env_.size(); ++i) {
            const int at = (env_.position + i + turn_) % env_.size();
            const auto& owner = owners_[static_cast<std::size_t>(at)];
            if (!owner.segments.empty() && owner.under_way < kWindow) return at;
        }
        return -1;
    }

    void send_sum(int at) {
        auto& owner = owners_[static_cast<std::size_t>(at)];
        const auto s = owner.segments.front();
        const int slot = slot_at(at);
        auto h = env_.header(FrameKind::GroupSum, op_);
        h.segment = s;
        h.length = op_.segment_bytes(s);
        FT_POINT("group.sum");
        FT_POINT("collective.part");
        if (only_own_input()) {
            // It stays as it is until the final comes, and that needs it.
            env_.sender.send_stable(slot, h, ByteView(op_.input(s), h.length));
        } else {
            auto* link = env_.sender.reserve(slot, h.length);  // the link's own memory, where there is room
            const auto* sum = sum_of_group(s, link);
            if (sum == nullptr) return;
            if (link != nullptr) env_.sender.commit(slot, h);
            else env_.sender.send(slot, h, ByteView(sum, h.length));
        }
        owner.segments.pop_front();
        ++owner.under_way;
        turn_ = (turn_ + 1) % env_.size();
    }

    bool only_own_input() const { return fellows().size() == 1 && op_.desc.op != ReduceOp::PremulSum; }
    std::byte* second_half(std::size_t bytes) { return room(parts_room(bytes) + bytes).data() + parts_room(bytes); }
    std::size_t parts_room(std::size_t bytes) const { return std::max<std::size_t>(2, fellows().size()) * bytes; }

    // Of the inputs of this group, in the order of the ranks: the own input itself, or in `to`, or (none given) in scratch. nullptr: it
    // could not be read.
    const std::byte* sum_of_group(std::uint32_t s, std::byte* to) {
        const std::size_t bytes = op_.segment_bytes(s);
        const auto n = op_.grid.count(s);
        const auto& d = op_.desc;
        const auto& members = fellows();
        if (only_own_input()) return op_.input(s);
        auto* scratch = room(parts_room(bytes) + bytes).data();
        const bool together = is_narrow_float(d.dtype) || d.op == ReduceOp::PremulSum;
        const std::byte* so_far = nullptr;
        for (std::size_t i = 0; i < members.size(); ++i) {
            const bool mine = members[i] == env_.position;
            auto* part = scratch + (together ? i : so_far == nullptr ? 0 : 1) * bytes;
            if (!mine && !read(members[i], peers_[static_cast<std::size_t>(members[i])].entry.input, s, part)) return nullptr;
            if (together) {
                if (mine) copy_bytes(part, op_.input(s), bytes);
                if (d.op == ReduceOp::PremulSum) scale(d.dtype, part, part, n, d.factor);
                continue;
            }
            const auto* next = mine ? op_.input(s) : part;
            auto* sum = i + 1 == members.size() && to != nullptr ? to : scratch;
            if (so_far != nullptr) reduce(d.dtype, d.op, sum, so_far, next, n);
            so_far = so_far == nullptr ? next : sum;
        }
        if (together) combine(d.dtype, d.op, to != nullptr ? to : scratch, scratch, members.size(), n, 1);
        return to != nullptr ? to : scratch;
    }

    // A fellow with a final that is not here yet.
    int source() const {
        for (int at : fellows()) {
            const auto& peer = peers_[static_cast<std::size_t>(at)];
            if (peer.next < peer.segments.size() && peer.next < peer.ready) return at;
        }
        return -1;
    }

    void fetch(int at) {
        auto& peer = peers_[static_cast<std::size_t>(at)];
        const auto s = peer.segments[peer.next];
        const bool here = op_.label(s) == LabelKind::Final;
        if (!here && !env_.needs_inputs) {  // as in pull_run.cc
            op_.set_lost(s);
            if (!read(at, peer.entry.result, s, op_.result(s))) return;
        } else if (!here) {  // by way of scratch: a read that breaks off must not have cost the input (invariant B)
            auto& scratch = room(op_.segment_bytes(s));
            if (!read(at, peer.entry.result, s, scratch.data())) return;
            copy_bytes(op_.result(s), scratch.data(), op_.segment_bytes(s));
        }
        op_.set_final(s, plan_of(s).contributors);
        ++peer.next;
        --remaining_;
        FT_POINT("group.fetch");
        FT_POINT("collective.part");
    }

    bool read(int at, std::uint64_t base, std::uint32_t s, std::byte* to) {
        const auto& entry = peers_[static_cast<std::size_t>(at)].entry;
        const auto from = base + op_.grid.offset(s) * size_of(op_.desc.dtype);
        const Transport::Remote remote{from, entry.ticket_at, entry.ticket};
        const auto result = read_shown(*env_.memory, env_.rules, slot_at(at), remote, to, op_.segment_bytes(s));
        refused = result == Transport::Read::Refused;  // if it is over: a death will be told, or this rank's own removal
        over_ = result != Transport::Read::Done;
        return !over_;
    }

    void check_data() {
        if (ring_ == nullptr && prepared_ && remaining_ == 0 && want_fence_ && !fence_.begun()) fence_.begin();
    }

    RunEnv env_;
    OpState& op_;
    const std::vector<SegmentRun> plan_;
    ReadTicket ticket_;
    std::vector<Peer> peers_;  // by position
    std::vector<Owner> owners_;  // by position
    int entered_ = 0;
    bool prepared_ = false;
    std::vector<Early> early_;
    std::vector<std::vector<int>> groups_;  // positions, ascending
    std::size_t own_ = 0;
    std::vector<std::uint32_t> run_of_;  // segment -> index into plan_
    std::vector<bool> handled_;  // of those shown: final here
    std::vector<std::uint32_t> shown_;  // segments that the fellows read here, in the plan's order
    std::size_t shown_ready_ = 0;
    std::deque<std::uint32_t> to_hand_out_;
    std::map<std::uint32_t, std::map<std::size_t, Bytes>> sums_;  // of own segments, by group, until all are there
    std::uint32_t remaining_ = 0;  // segments whose final has not come, or been made, here
    int turn_ = 0;
    bool over_ = false;  // a read did not count: this attempt gets nowhere
    std::unique_ptr<Run> ring_;  // instead, when nobody has a fellow
    const bool want_fence_;
    Fence fence_;
};

}  // namespace

std::unique_ptr<Run> make_groups_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, bool fence, std::uint64_t ticket) {
    return std::make_unique<GroupsRun>(std::move(env), op, std::move(plan), fence, ticket);
}

}  // namespace ftcomm
