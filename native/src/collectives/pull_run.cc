// Ranks that can read each other's memory: every owner reads its segments out of all inputs, reduces them, and says so; then
// everyone reads the finals out of their owners' buffers. No copy on the way: n - 1 reads for the reduction and one for each final.
// The same plans as the ring, repairs included. Reduce-scatter and all-gather by direct access: Parsons and Pai 2014.
//
// What is read belongs to a process that may be ahead of us, or be gone. Its ticket stands while its buffers are the operation's:
// a read counts only if the ticket still stands after it (C9). A rank that stopped in the middle of a read, and wakes up when the
// others have gone on without it, therefore never takes their next data for this operation's.
//
// The fence is not for failures alone: without it an owner would return while others still read its buffer.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/logged_share.h"
#include "collectives/run.h"
#include "collectives/ticket_words.h"

namespace ftcomm {

namespace {

constexpr std::uint32_t kBatch = 2;  // segments a read: a system call costs as much as the copy of 10 KiB
constexpr std::uint64_t kFetchBytes = 4u << 20;  // a read where nothing is reduced, so that nobody waits for a sum meanwhile
constexpr std::uint32_t kAnnounceShares = 8;  // segments: frames are few, and the others do not wait for the whole of a share

struct PullEntry {  // payload of PullEnter
    std::uint64_t input = 0, result = 0;  // addresses of segment 0; of ranks that have no such buffer, never used
    std::uint64_t ticket_at = 0, ticket = 0;
    std::uint64_t own = 0;  // the same of an all-gather's input: the sender's own block, which nobody writes to
    std::uint64_t ready =
        0;  // so many of its segments are final from the start, and there to be read; those that it pushes are not
};

class PullRun final : public Run {
public:
    PullRun(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket)
        : env_(std::move(env)),
          op_(op),
          plan_(std::move(plan)),
          ticket_(*env_.tickets, ticket),
          peers_(env_.living.size()),
          share_(env_, op_),
          fence_(env_, op_) {}
    bool brings_in() const override { return true; }
    void settle() override { op_.bring_in(); }
    void start() override {
        const auto own = own_input();
        if (own == 0) op_.bring_in();  // else others read it where the caller has it
        std::uint32_t s = 0;
        for (const auto& r : plan_) {
            const auto first = s;
            s += r.count;
            if (r.mode == SegmentMode::Absent)
                for (auto a = first; a < s; ++a) op_.set_absent(a);
            if (r.mode != SegmentMode::Reduce && r.mode != SegmentMode::Gather) continue;
            const int at = env_.position_of(r.rank);
            FT_CHECK(at >= 0, "the plan names rank %d, which is not alive", r.rank);
            auto& list = peers_[static_cast<std::size_t>(at)].segments;
            for (auto a = first; a < s; ++a) list.push_back({a, &r});
            if (r.mode == SegmentMode::Reduce)
                FT_CHECK(r.contributors == RankSet::of(env_.living), "a sum over %s among %s", r.contributors.text().c_str(),
                         RankSet::of(env_.living).text().c_str());
            const bool here = r.mode == SegmentMode::Reduce && at == env_.position;
            const bool fetch = at != env_.position && (r.mode == SegmentMode::Gather || op_.shape.shares_finals());
            if (here || fetch) remaining_ += r.count;
        }
        if (all_are_held())
            fetch_batch_ = static_cast<std::uint32_t>(
                std::max<std::uint64_t>(kBatch, kFetchBytes / (op_.grid.segment_elements * size_of(op_.desc.dtype))));
        FT_CHECK(s == op_.grid.segments(), "plan covers %u of %u segments", s, op_.grid.segments());
        share_.begin(plan_);
        ticket_.issue();
        auto& me = self();
        while (me.next < me.segments.size() && hands_out(me.segments[me.next])) ++me.next;
        me.ready = me.next;
        PullEntry mine{address(op_.input(0)), address(op_.result(0)), ticket_.place(), ticket_.number()};
        mine.own = own;
        const bool pushed = pushes();
        mine.ready = pushed ? 0 : me.ready;
        // reduce_scatter: result(0) is another rank's block; nobody reads results there.
        FT_POINT("pull.enter");
        // Who has nothing to be read tells its predecessor alone: so that neighbours who call different operations always notice.
        const int first = all_are_held() && me.segments.empty() ? env_.size() - 1 : 1;
        for (int i = first; i < env_.size(); ++i)
            env_.sender.send(slot_at(env_.position + i), env_.header(FrameKind::PullEnter, op_), bytes_of(mine));
        if (env_.log != nullptr) op_.bring_in();  // the fence is for what is in the log
        me.entry = mine;
        me.entered = true;
        entered_ = 1;
        if (pushed) push();
        check_data();
    }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        const int at = env_.position_of(from);
        if (at < 0) return;
        auto& peer = peers_[static_cast<std::size_t>(at)];
        switch (h.kind) {
            case FrameKind::PullEnter:
                FT_CHECK(payload.size() == sizeof(PullEntry) && !peer.entered, "rank %d enters with %zu bytes", from,
                         payload.size());
                std::memcpy(&peer.entry, payload.data(), sizeof(PullEntry));
                FT_CHECK(peer.entry.ready <= peer.segments.size(), "%llu of %zu segments are final at rank %d",
                         static_cast<unsigned long long>(peer.entry.ready), peer.segments.size(), from);
                peer.ready = static_cast<std::uint32_t>(peer.entry.ready);
                peer.entered = true;
                ++entered_;
                check_data();  // there may be nothing to do here
                return;
            case FrameKind::PullReady:
                FT_CHECK(h.segment > peer.ready && h.segment <= peer.segments.size(), "%u of %zu segments are final at rank %d",
                         h.segment, peer.segments.size(), from);
                peer.ready = h.segment;
                peer.logged = (h.flags & 1) != 0;
                return;
            case FrameKind::Gather:
                if (peer.entered) on_pushed(peer, h.segment, payload);  // else it was called with another algorithm there
                return;
            case FrameKind::Fence: fence_.on_frame(h); return;
            case FrameKind::Enter:
            case FrameKind::GroupEnter: mismatch = true; return;  // it was called with another algorithm there
            default: return;
        }
    }

    bool has_work() const override { return !over_ && (own_turn() || source() >= 0 || op_.own().left() > 0); }

    void work() override {
        if (over_) return;
        if (own_turn()) {
            advance_own();
        } else if (const int at = source(); at >= 0) {
            fetch(at);
        } else {
            op_.bring_in(kFetchBytes);
        }
        check_data();
    }

    bool done() const override { return remaining_ == 0 && fence_.done() && op_.own().left() == 0; }
    const char* phase() const override {
        const bool waits = !all_have_entered() || (all_are_held() && entered_ == 1 && remaining_ > 0);
        return waits ? "the others to enter" : remaining_ > 0 ? "data" : "the completion fence";
    }

private:
    struct Item {
        std::uint32_t segment;
        const SegmentRun* run;
    };
    struct Peer {
        PullEntry entry;
        bool entered = false;
        std::vector<Item> segments;  // that it owns or holds, in the plan's order
        std::uint32_t ready = 0;  // so many of them are final there
        bool logged = false;  // and in its log
        std::uint32_t next = 0;  // so many of them are done with here
    };

    static std::uint64_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }
    static ByteView bytes_of(const PullEntry& entry) { return std::as_bytes(std::span(&entry, 1)); }
    int slot_at(int position) const { return env_.slot_of(env_.rank_at(position)); }
    std::uint64_t offset(std::uint32_t s) const { return op_.grid.offset(s) * size_of(op_.desc.dtype); }
    // Of an all-gather by its caller, whose input is not where results are written to.
    std::uint64_t own_input() const {
        const auto& d = op_.desc;
        if (op_.shape.kind != OpKind::AllGather || op_.request == nullptr || d.send == nullptr) return 0;
        const auto& own = op_.own();
        if (own.meets(static_cast<const std::byte*>(d.recv), op_.grid.blocks * own.bytes)) return 0;
        return address(own.from) - static_cast<std::uint64_t>(env_.rank) * own.bytes;
    }
    Peer& self() { return peers_[static_cast<std::size_t>(env_.position)]; }
    const Peer& self() const { return peers_[static_cast<std::size_t>(env_.position)]; }

    // The address of segment 0 where that rank holds the final `s`: its own block is in its input, if others read that.
    std::uint64_t held_at(int at, std::uint32_t s) const {
        const auto& entry = peers_[static_cast<std::size_t>(at)].entry;
        const bool own = entry.own != 0 && op_.grid.block_of(s) == static_cast<std::uint32_t>(env_.rank_at(at));
        return own ? entry.own : entry.result;
    }

    // The same for all operations, and nothing stays in it: fresh pages cost more than what is done with them.
    Bytes& room(std::size_t bytes) {
        if (env_.scratch->size() < bytes) env_.scratch->resize(bytes);
        return *env_.scratch;
    }

    // Nobody reads inputs: who hands out nothing need not be heard of before the fence.
    bool all_are_held() const { return gathers(op_.shape.kind); }
    bool all_have_entered() const { return all_are_held() || entered_ == env_.size(); }
    bool hands_out(const Item& item) const {
        if (item.run->mode != SegmentMode::Gather) return false;
        FT_CHECK(op_.label(item.segment) == LabelKind::Final, "asked to hand out segment %u without having it", item.segment);
        return true;
    }

    // Of two ranks with a processor each, what is not more than the caches hold comes sooner so while these are near (base/shared_writer.h).
    bool pushes() {
        if (!all_are_held() || env_.size() != 2 || self().segments.empty()) return false;
        std::uint64_t bytes = 0;
        for (const auto& item : self().segments) bytes += op_.segment_bytes(item.segment);
        return env_.comes_sooner(env_.successor(), bytes);
    }

    void push() {
        for (const auto& item : self().segments) {
            const auto s = item.segment;
            auto h = env_.header(FrameKind::Gather, op_);
            h.segment = s;
            const auto* from =
                reinterpret_cast<const std::byte*>(held_at(env_.position, s) + offset(s));  // NOLINT: as readers are told
            env_.sender.send_stable(env_.slot_of(env_.successor()), h, ByteView(from, op_.segment_bytes(s)));
        }
        FT_POINT("pull.ready");
    }

    void on_pushed(Peer& peer, std::uint32_t s, ByteView payload) {
        FT_CHECK(
            peer.next < peer.segments.size() && peer.segments[peer.next].segment == s && payload.size() == op_.segment_bytes(s),
            "segment %u with %zu bytes, which is not the next one", s, payload.size());
        if (op_.label(s) != LabelKind::Final) copy_bytes(op_.result(s), payload.data(), payload.size());
        have_final(peer, 1);
        check_data();
    }

    // Own segments first: the others wait for them. A final that is only handed out waits for nobody.
    bool own_turn() const {
        const auto& me = self();
        if (me.next == me.segments.size()) return false;
        return me.segments[me.next].run->mode == SegmentMode::Gather || all_have_entered();
    }

    void advance_own() {
        auto& me = self();
        const auto& item = me.segments[me.next];
        if (item.run->mode == SegmentMode::Gather) {
            while (me.next < me.segments.size() && hands_out(me.segments[me.next])) ++me.next;
        } else {
            const auto n = batch(me, static_cast<std::uint32_t>(me.segments.size()), kBatch);
            if (!reduce_own(item, n)) return;
            me.logged = share_.put(item.segment, n);
            me.next += n;
            remaining_ -= n;
        }
        if (me.next < me.segments.size() && me.next - me.ready < kAnnounceShares) return;
        me.ready = me.next;
        if (item.run->mode == SegmentMode::Reduce && !op_.shape.shares_finals()) return;
        auto h = env_.header(FrameKind::PullReady, op_);
        h.segment = me.ready;
        h.flags = me.logged ? 1 : 0;
        for (int i = 1; i < env_.size(); ++i) env_.sender.send(slot_at(env_.position + i), h);
        FT_POINT("pull.ready");
    }

    // How many of the peer's next segments, of those before `end`, lie side by side and have the same fate.
    std::uint32_t batch(const Peer& peer, std::uint32_t end, std::uint32_t most) const {
        const auto& first = peer.segments[peer.next];
        const auto label = kind(first);
        std::uint32_t n = 1;
        for (; n < most && peer.next + n < end; ++n) {
            const auto& item = peer.segments[peer.next + n];
            if (item.segment != first.segment + n || item.run != first.run ||
                op_.grid.block_of(item.segment) != op_.grid.block_of(first.segment) || kind(item) != label)
                break;
        }
        return n;
    }

    LabelKind kind(const Item& item) const { return op_.label(item.segment); }

    void set_final(const Item& first, std::uint32_t segments) {
        for (std::uint32_t i = 0; i < segments; ++i) op_.set_final(first.segment + i, first.run->contributors);
    }

    // The parts in the order of the ranks, whoever owns the segments; the last step alone writes to the caller's buffer, when all
    // that can fail has been done (invariant B).
    bool reduce_own(const Item& item, std::uint32_t segments) {
        const auto s = item.segment;
        const auto n = op_.grid.count(s, segments);
        const auto bytes = n * size_of(op_.desc.dtype);
        const auto& d = op_.desc;
        const auto parts = static_cast<std::size_t>(env_.size());
        const auto divisor = d.op == ReduceOp::Avg ? static_cast<std::uint32_t>(parts) : 1;
        auto* out = op_.result(s);
        const auto dtype = d.dtype;
        const bool narrow = is_narrow_float(dtype);
        if (narrow || d.op == ReduceOp::PremulSum) {
            auto& scratch = room(parts * bytes);
            for (int i = 0; i < env_.size(); ++i) {
                auto* part = scratch.data() + static_cast<std::size_t>(i) * bytes;
                if (i == env_.position) copy_bytes(part, op_.input(s), bytes);
                else if (!read(i, peers_[static_cast<std::size_t>(i)].entry.input, s, part, bytes)) return false;
                if (d.op == ReduceOp::PremulSum) scale(dtype, part, part, n, d.factor);
            }
            combine(dtype, d.op, scratch.data(), scratch.data(), parts, n, divisor);
            copy_bytes(out, scratch.data(), bytes);
        } else {
            auto& scratch = room(2 * std::size_t{bytes});
            auto* sum = scratch.data();
            auto* part = sum + bytes;
            const std::byte* so_far = nullptr;
            for (int i = 0; i < env_.size(); ++i) {
                const std::byte* next = i == env_.position ? op_.input(s) : so_far == nullptr ? sum : part;
                if (i != env_.position &&
                    !read(i, peers_[static_cast<std::size_t>(i)].entry.input, s, so_far == nullptr ? sum : part, bytes))
                    return false;
                if (so_far == nullptr) {
                    so_far = next;
                    continue;
                }
                auto* to = i + 1 == env_.size() ? out : sum;
                reduce(dtype, d.op, to, so_far, next, n);
                so_far = to;
            }
            if (divisor != 1) divide(dtype, out, n, divisor);
        }
        set_final(item, segments);
        FT_POINT("pull.reduce");
        FT_POINT("collective.part");
        return true;
    }

    // A peer with a final that is not here yet, starting behind ourselves: not all at the same one.
    int source() const {
        for (int i = 1; i < env_.size(); ++i) {
            const int at = (env_.position + i) % env_.size();
            const auto& peer = peers_[static_cast<std::size_t>(at)];
            if (peer.entered && peer.next < peer.ready &&
                (op_.shape.shares_finals() || peer.segments[peer.next].run->mode == SegmentMode::Gather))
                return at;
        }
        return -1;
    }

    void fetch(int at) {
        auto& peer = peers_[static_cast<std::size_t>(at)];
        const auto& item = peer.segments[peer.next];
        const auto s = item.segment;
        const auto segments = batch(peer, peer.ready, fetch_batch_);
        const auto bytes = op_.grid.count(s, segments) * size_of(op_.desc.dtype);
        const auto label = op_.label(s);
        const auto from = held_at(at, s);
        if (label == LabelKind::Empty || (label == LabelKind::Input && !env_.needs_inputs)) {
            // A read that breaks off costs the input. Its owner has the final; if it dies, the operation fails.
            lose(s, segments);
            if (!read(at, from, s, op_.result(s), bytes)) return;
        } else if (label == LabelKind::Input && peer.logged && share_.find(env_.rank_at(at), s, segments)) {
            if (!read(at, from, s, op_.result(s), bytes)) {  // that has cost the input
                if (!share_.take(s)) return lose(s, segments);
                over_ = refused = false;
            }
        } else if (label == LabelKind::Input) {  // by way of scratch: a read that breaks off must not have cost it (invariant B)
            auto& scratch = room(bytes);
            if (!read(at, from, s, scratch.data(), bytes)) return;
            copy_bytes(op_.result(s), scratch.data(), bytes);
        }
        have_final(peer, segments);
    }

    void have_final(Peer& peer, std::uint32_t segments) {
        set_final(peer.segments[peer.next], segments);
        peer.next += segments;
        remaining_ -= segments;
        FT_POINT("pull.final");
        FT_POINT("collective.part");
    }

    void lose(std::uint32_t s, std::uint32_t segments) {
        for (std::uint32_t i = 0; i < segments; ++i) op_.set_lost(s + i);
    }

    bool read(int at, std::uint64_t base, std::uint32_t s, std::byte* to, std::size_t bytes) {
        const auto& entry = peers_[static_cast<std::size_t>(at)].entry;
        Transport::Remote remote{base + offset(s), entry.ticket_at, entry.ticket};
        const auto result = read_shown(*env_.memory, env_.rules, slot_at(at), remote, to, bytes);
        refused = result == Transport::Read::Refused;  // if it is over: a death will be told, or this rank's own removal
        over_ = result != Transport::Read::Done;
        return !over_;
    }

    void check_data() {
        if (remaining_ == 0 && all_have_entered() && op_.own().left() <= kOwnLast && !fence_.begun()) fence_.begin();
    }

    RunEnv env_;
    OpState& op_;
    const std::vector<SegmentRun> plan_;
    ReadTicket ticket_;
    std::vector<Peer> peers_;  // by position
    int entered_ = 0;
    std::uint32_t fetch_batch_ = kBatch;
    std::uint32_t remaining_ = 0;  // segments to reduce or to fetch here
    bool over_ = false;  // a read did not count: this attempt gets nowhere
    LoggedShare share_;
    Fence fence_;
};

}  // namespace

std::unique_ptr<Run> make_pull_run(RunEnv env, OpState& op, std::vector<SegmentRun> plan, std::uint64_t ticket) {
    return std::make_unique<PullRun>(std::move(env), op, std::move(plan), ticket);
}

}  // namespace ftcomm
