// Gather, scatter, all-to-all: each pair's bytes go straight from source to destination. Few of them come with the frame that says that the
// source has entered. Where the destination may read the source's memory, and there is much of it, that frame shows where it lies (C9, as in
// pull_run.cc). Else it goes once the destination has entered. Each source decides so for each of its destinations: counts may differ, and only these
// two know theirs.
#include <algorithm>
#include <cstring>
#include <functional>

#include "base/check.h"
#include "base/copy.h"
#include "base/failpoint.h"
#include "collectives/layout.h"
#include "collectives/own_part.h"
#include "collectives/run.h"
#include "collectives/ticket_words.h"

namespace ftcomm {

namespace {

constexpr std::uint64_t kNothingExpected = ~std::uint64_t{0};
constexpr std::uint64_t kOwnPiece = 256u << 10;  // copied at a time: frames get their turn in between
constexpr std::uint64_t kOwnAtOnce = 16u << 10;
enum EnterFlags : std::uint8_t { kBrings = 1, kShows = 2 };  // the payload: the data, or Shown

struct Shown {
    std::uint64_t bytes;
    Transport::Remote remote;
};

class DirectRun final : public Run {
public:
    DirectRun(RunEnv env, OpState& op, DirectLimits limits, std::uint64_t ticket)
        : env_(std::move(env)),
          op_(op),
          limits_(limits),
          own_piece_(std::min(kOwnPiece, limits.read_bytes)),
          ticket_(*env_.tickets, ticket),
          pairs_(env_.living.size()),
          fence_(env_, op_) {}

    void start() override {
        lay_out();
        for (int i = 1; i < env_.size(); ++i) {  // not all to the same one first
            auto& pair = pair_at(env_.position + i);
            // The predecessor in any case: so that neighbours who call different operations always notice.
            if (pair.sends || pair.receives || i == env_.size() - 1) enter(env_.rank_at(env_.position + i), pair);
        }
        if (own_.left() <= std::min(kOwnAtOnce, own_piece_) || env_.log != nullptr)
            own_.copy(own_.left());  // while those are under way
        check_data();
    }

    // Nobody waits for what this rank has for itself: it is copied when there is nothing to read, and last, behind the fence's beginning.
    void settle() override { own_.copy(own_.left()); }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        if (h.kind == FrameKind::Fence) {
            fence_.on_frame(h);
            return;
        }
        const int at = env_.position_of(from);
        if (at < 0) return;
        auto& pair = pair_at(at);
        if (h.kind == FrameKind::Enter) {
            if (!agrees(pair, h, payload)) {
                mismatch = true;
                return;
            }
            if (h.flags == kBrings) {
                take(pair, payload);
            } else if (h.flags == kShows) {
                std::memcpy(&pair.shown, payload.data(), sizeof pair.shown);
            }
            pair.heard = true;
            pump(from, pair);
        } else if (h.kind == FrameKind::Direct) {
            take(pair, payload);
        }
        check_data();
    }

    void on_writable(int slot) override {
        for (int i = 0; i < env_.size(); ++i)
            if (env_.slot_of(env_.rank_at(i)) == slot) pump(env_.rank_at(i), pair_at(i));
        check_data();
    }

    bool has_work() const override { return !over_ && (to_read() >= 0 || own_.left() > 0); }

    void work() override {
        if (over_) return;
        if (const int at = to_read(); at >= 0) read(env_.rank_at(at), pair_at(at));
        else own_.copy(own_piece_);
        check_data();
    }

    bool done() const override { return fence_.done() && own_.left() == 0; }
    const char* phase() const override { return fence_.begun() ? "the completion fence" : "data"; }

private:
    struct Pair {  // of this rank and another one
        bool sends = false, receives = false;  // this rank, to and from that one
        const std::byte* from = nullptr;
        std::uint64_t out_bytes = 0, out_done = 0;
        bool heard = false;  // it has entered, and expects what this rank has for it
        std::byte* to = nullptr;
        std::uint64_t in_bytes = 0, in_done = 0;
        Shown shown = {};  // in_bytes, if they are there to be read, and no frame brings them; else none
    };

    Pair& pair_at(int position) { return pairs_[static_cast<std::size_t>((position + env_.size()) % env_.size())]; }

    void lay_out() {
        const auto& d = op_.desc;
        const auto size = size_of(d.dtype);
        const auto& per = d.per_rank();
        const Layout sends{per.send_counts, per.send_offsets, d.count};
        const Layout recvs{per.recv_counts, per.recv_offsets, d.count};
        const auto* send = static_cast<const std::byte*>(d.send);
        auto* recv = static_cast<std::byte*>(d.recv);
        const bool root = env_.rank == d.root;
        const auto kind = op_.shape.kind;
        const bool sends_many = kind == OpKind::AllToAll || (kind == OpKind::Scatter && root);
        const bool receives_many = kind == OpKind::AllToAll || (kind == OpKind::Gather && root);
        auto out_data = [&](int r) { return sends_many ? send + sends.offset(r) * size : send; };
        auto out_bytes = [&](int r) { return (sends_many ? sends.count(r) : d.count) * size; };
        auto in_data = [&](int r) { return receives_many ? recv + recvs.offset(r) * size : recv; };
        auto in_bytes = [&](int r) { return (receives_many ? recvs.count(r) : d.count) * size; };

        for (int i = 0; i < env_.size(); ++i) {
            const int r = env_.rank_at(i);
            const bool to = kind == OpKind::AllToAll || (kind == OpKind::Gather ? r == d.root : root);
            const bool from = kind == OpKind::AllToAll || (kind == OpKind::Gather ? root : r == d.root);
            if (i == env_.position) {
                if (to && from && in_data(r) != out_data(r))
                    own_ = {out_data(r), in_data(r), std::min(in_bytes(r), out_bytes(r))};
                continue;
            }
            auto& pair = pair_at(i);
            if (to) {
                pair.sends = true;
                pair.from = out_data(r);
                pair.out_bytes = out_bytes(r);
            }
            if (from) {
                pair.receives = true;
                pair.to = in_data(r);
                pair.in_bytes = in_bytes(r);
            }
        }
        // Nothing may be received over it, itself least of all, before it is where it belongs.
        bool overlaps = own_.meets(own_.to, own_.bytes);
        for (const auto& pair : pairs_) overlaps |= own_.meets(pair.to, pair.in_bytes);
        const int all = receives_many ? static_cast<int>(env_.slots.size()) : 0;
        const auto is_absent = [&](int r) { return env_.position_of(r) < 0 && in_bytes(r) > 0; };
        for (int r = 0; r < all; ++r) overlaps |= is_absent(r) && own_.meets(in_data(r), in_bytes(r));
        if (overlaps) own_.copy(own_.left());
        for (int r = 0; r < all; ++r)
            if (is_absent(r)) std::memset(in_data(r), 0, in_bytes(r));
    }

    // What it shows is free again when the fence is through: nobody is before all have begun it, and who has not read has not.
    void enter(int rank, Pair& pair) {
        auto h = env_.header(FrameKind::Enter, op_);
        h.aux2 = pair.receives ? pair.in_bytes : kNothingExpected;
        const bool can_show =
            pair.out_bytes > 0 && pair.out_bytes >= limits_.show && env_.memory->shares_memory(env_.slot_of(rank));
        const bool shows = can_show && !env_.comes_sooner(rank, pair.out_bytes) && ticket_.issue();
        const bool brings =
            pair.sends && !shows && pair.out_bytes <= std::min<std::uint64_t>(limits_.bring, env_.sender.max_payload());
        Shown shown{pair.out_bytes, {reinterpret_cast<std::uintptr_t>(pair.from), ticket_.place(), ticket_.number()}};
        ByteView payload;
        if (brings) payload = {pair.from, pair.out_bytes};
        else if (shows) payload = std::as_bytes(std::span(&shown, 1));
        if (brings || shows) {
            h.flags = brings ? kBrings : kShows;
            pair.out_done = pair.out_bytes;
        }
        env_.sender.send(env_.slot_of(rank), h, payload);
        FT_POINT("direct.enter");
        if (shows) FT_POINT("direct.show");
    }

    // What each of the two has for the other one is what that one expects.
    bool agrees(const Pair& pair, const FrameHeader& h, ByteView payload) const {
        if (h.aux2 != (pair.sends ? pair.out_bytes : kNothingExpected)) return false;
        if (h.flags == 0) return true;
        if (!pair.receives) return false;
        if (h.flags == kBrings) return payload.size() == pair.in_bytes;
        Shown shown{};
        FT_CHECK(payload.size() == sizeof shown && pair.in_done == 0 && pair.shown.bytes == 0, "a rank shows %zu bytes",
                 payload.size());
        std::memcpy(&shown, payload.data(), sizeof shown);
        return shown.bytes == pair.in_bytes;
    }

    void take(Pair& pair, ByteView payload) {
        FT_CHECK(pair.in_done + payload.size() <= pair.in_bytes, "a rank sent more than was asked for");
        copy_bytes(pair.to + pair.in_done, payload.data(), payload.size());
        pair.in_done += payload.size();
        FT_POINT("direct.receive");
        FT_POINT("collective.part");
    }

    void pump(int rank, Pair& pair) {
        const int slot = env_.slot_of(rank);
        while (pair.heard && pair.out_done < pair.out_bytes) {
            const auto n = static_cast<std::uint32_t>(
                std::min<std::uint64_t>({pair.out_bytes - pair.out_done, env_.sender.max_payload(), 128u << 10}));
            auto* p = env_.sender.reserve(slot, n);
            if (p == nullptr) return;  // on_writable comes
            env_.sender.fill(slot, p, pair.from + pair.out_done, n);
            auto h = env_.header(FrameKind::Direct, op_);
            h.length = n;
            env_.sender.commit(slot, h);
            pair.out_done += n;
            FT_POINT("direct.send");
        }
    }

    // Of the sources behind this rank the next: not all read the same one at once.
    int to_read() const {
        for (int i = 1; i < env_.size(); ++i) {
            const int at = (env_.position + i) % env_.size();
            const auto& pair = pairs_[static_cast<std::size_t>(at)];
            if (pair.in_done < pair.shown.bytes) return at;
        }
        return -1;
    }

    // Into the caller's buffer at once: there is no input in it that a read which breaks off could cost (invariant B).
    void read(int rank, Pair& pair) {
        const auto n = std::min(pair.in_bytes - pair.in_done, limits_.read_bytes);
        auto remote = pair.shown.remote;
        remote.from += pair.in_done;
        const auto result = read_shown(*env_.memory, env_.rules, env_.slot_of(rank), remote, pair.to + pair.in_done, n);
        if (result == Transport::Read::Done) {
            pair.in_done += n;
            FT_POINT("direct.read");
            return;
        }
        refused = result == Transport::Read::Refused;  // else a death will be told, or this rank's own removal
        over_ = true;
    }

    // Whoever begins the fence has all of its result, but for what it has for itself, and has that before the run is given up: if another one has
    // returned, a vote calls the operation complete here, too. And it has heard from all that it receives from: so that nobody is through before it
    // is known that what each has for another is what that one expects.
    void check_data() {
        if (fence_.begun() || own_.left() > kOwnLast) return;
        for (const auto& pair : pairs_)
            if (pair.out_done < pair.out_bytes || pair.in_done < pair.in_bytes || (pair.receives && !pair.heard)) return;
        fence_.begin();
    }

    RunEnv env_;
    OpState& op_;
    const DirectLimits limits_;
    const std::uint64_t own_piece_;
    ReadTicket ticket_;
    std::vector<Pair> pairs_;  // by position
    OwnPart own_;  // what this rank has for itself
    bool over_ = false;  // a read did not count: this attempt gets nowhere
    Fence fence_;
};

}  // namespace

std::unique_ptr<Run> make_direct_run(RunEnv env, OpState& op, DirectLimits limits, std::uint64_t ticket) {
    return std::make_unique<DirectRun>(std::move(env), op, limits, ticket);
}

}  // namespace ftcomm
