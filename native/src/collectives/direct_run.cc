// Gather, scatter, all-to-all: each pair's bytes go straight from source to destination, once the destination has entered. Where that
// may read the source's memory, and there is much of it, the source only shows where it lies (C9, as in pull_run.cc). Each source
// decides so for each of its destinations: counts may differ, and only these two know theirs.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"
#include "collectives/run.h"
#include "collectives/ticket.h"

namespace ftcomm {

namespace {

constexpr std::uint64_t kNothingExpected = ~std::uint64_t{0};

struct Layout {
    const std::vector<std::uint64_t>& counts;
    const std::vector<std::uint64_t>& offsets;
    std::uint64_t uniform;

    std::uint64_t count(int r) const { return counts.empty() ? uniform : counts[static_cast<std::size_t>(r)]; }
    std::uint64_t offset(int r) const {
        if (!offsets.empty()) return offsets[static_cast<std::size_t>(r)];
        if (counts.empty()) return uniform * static_cast<std::uint64_t>(r);
        std::uint64_t at = 0;
        for (int i = 0; i < r; ++i) at += counts[static_cast<std::size_t>(i)];
        return at;
    }
};

class DirectRun final : public Run {
public:
    DirectRun(RunEnv env, OpState& op, std::uint64_t show_limit, std::uint64_t read_bytes, std::uint64_t ticket)
        : env_(std::move(env)),
          op_(op),
          show_limit_(show_limit),
          read_bytes_(read_bytes),
          ticket_(env_.ticket, ticket),
          fence_(env_, op_) {}

    void start() override {
        lay_out();
        ticket_.issue();
        bool told_predecessor = false;
        for (auto& in : in_) {
            auto h = env_.header(FrameKind::Enter, op_);
            h.aux2 = in.bytes;
            env_.sender.send(env_.slot_of(in.rank), h);
            told_predecessor |= in.rank == env_.predecessor();
            FT_POINT("direct.enter");
        }
        if (!told_predecessor) {  // so that neighbours who call different operations always notice
            auto h = env_.header(FrameKind::Enter, op_);
            h.aux2 = kNothingExpected;
            env_.sender.send(env_.slot_of(env_.predecessor()), h);
        }
        check_data();
    }

    void on_frame(int from, const FrameHeader& h, ByteView payload) override {
        if (h.kind == FrameKind::Fence) {
            fence_.on_frame(h);
            return;
        }
        if (h.kind == FrameKind::Enter) {
            if (h.aux2 == kNothingExpected) return;
            for (auto& out : out_) {
                if (out.rank != from) continue;
                if (h.aux2 != out.bytes) {
                    mismatch = true;
                    return;
                }
                out.open = true;
                if (shows(out)) show(out);
                else pump(out);
            }
        } else if (h.kind == FrameKind::DirectShow) {
            for (auto& in : in_) {
                if (in.rank != from) continue;
                FT_CHECK(payload.size() == sizeof(Transport::Remote) && in.done == 0 && in.bytes > 0 && !in.shown,
                         "rank %d shows %zu bytes", from, payload.size());
                std::memcpy(&in.remote, payload.data(), sizeof in.remote);
                in.shown = true;
            }
        } else if (h.kind == FrameKind::Direct) {
            for (auto& in : in_) {
                if (in.rank != from) continue;
                FT_CHECK(in.done + payload.size() <= in.bytes, "rank %d sent more than was asked for", from);
                std::memcpy(in.data + in.done, payload.data(), payload.size());
                in.done += payload.size();
                FT_POINT("direct.receive");
            }
        }
        check_data();
    }

    void on_writable(int slot) override {
        for (auto& out : out_)
            if (env_.slot_of(out.rank) == slot) pump(out);
        check_data();
    }

    bool has_work() const override { return !over_ && to_read() >= 0; }

    void work() override {
        if (over_) return;
        if (const int i = to_read(); i >= 0) read(in_[static_cast<std::size_t>(i)]);
        check_data();
    }

    bool done() const override { return fence_.done(); }
    const char* phase() const override { return fence_.begun() ? "the completion fence" : "data"; }

private:
    struct Out {
        int rank;
        const std::byte* data;
        std::uint64_t bytes, done = 0;
        bool open = false;
    };
    struct In {
        int rank;
        std::byte* data;
        std::uint64_t bytes, done = 0;
        Transport::Remote remote = {};
        bool shown = false;  // it is there to be read, and no frame brings it
    };

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

        if (receives_many) {  // an absent rank's part: zeros
            for (int r = 0; r < static_cast<int>(env_.slots.size()); ++r)
                if (env_.position_of(r) < 0 && in_bytes(r) > 0) std::memset(in_data(r), 0, in_bytes(r));
        }
        for (int r : env_.living) {
            const bool to = kind == OpKind::AllToAll || (kind == OpKind::Gather ? r == d.root : root);
            const bool from = kind == OpKind::AllToAll || (kind == OpKind::Gather ? root : r == d.root);
            if (r == env_.rank) {
                if (to && from && in_bytes(r) > 0 && in_data(r) != out_data(r))
                    std::memmove(in_data(r), out_data(r), std::min(in_bytes(r), out_bytes(r)));
                continue;
            }
            if (to) out_.push_back({r, out_data(r), out_bytes(r)});
            if (from) in_.push_back({r, in_data(r), in_bytes(r)});
        }
    }

    void pump(Out& out) {
        const int slot = env_.slot_of(out.rank);
        while (out.open && out.done < out.bytes) {
            const auto n = static_cast<std::uint32_t>(
                std::min<std::uint64_t>({out.bytes - out.done, env_.sender.max_payload(), 128u << 10}));
            auto* p = env_.sender.reserve(slot, n);
            if (p == nullptr) return;  // on_writable comes
            std::memcpy(p, out.data + out.done, n);
            auto h = env_.header(FrameKind::Direct, op_);
            h.length = n;
            env_.sender.commit(slot, h);
            out.done += n;
            FT_POINT("direct.send");
        }
    }

    bool shows(const Out& out) const {
        return out.bytes > 0 && out.bytes >= show_limit_ && env_.memory->shares_memory(env_.slot_of(out.rank));
    }

    // The fence says when it has been read: nobody is through before all have begun it, and who has not read has not.
    void show(Out& out) {
        const Transport::Remote remote{reinterpret_cast<std::uintptr_t>(out.data), ticket_.address(), ticket_.number()};
        env_.sender.send(env_.slot_of(out.rank), env_.header(FrameKind::DirectShow, op_), std::as_bytes(std::span(&remote, 1)));
        out.done = out.bytes;
        FT_POINT("direct.show");
    }

    // Of the sources behind this rank the next: not all read the same one at once.
    int to_read() const {
        int first = -1;
        for (std::size_t i = 0; i < in_.size(); ++i) {
            if (!in_[i].shown || in_[i].done == in_[i].bytes) continue;
            if (in_[i].rank > env_.rank) return static_cast<int>(i);
            if (first < 0) first = static_cast<int>(i);
        }
        return first;
    }

    // Into the caller's buffer at once: there is no input in it that a read which breaks off could cost (invariant B).
    void read(In& in) {
        const auto n = std::min(in.bytes - in.done, read_bytes_);
        auto remote = in.remote;
        remote.from += in.done;
        const auto result = read_shown(*env_.memory, env_.rules, env_.slot_of(in.rank), remote, in.data + in.done, n);
        if (result == Transport::Read::Done) {
            in.done += n;
            FT_POINT("direct.read");
            return;
        }
        refused = result == Transport::Read::Refused;  // else a death will be told, or this rank's own removal
        over_ = true;
    }

    void check_data() {
        if (fence_.begun()) return;
        for (const auto& out : out_)
            if (!out.open || out.done < out.bytes) return;
        for (const auto& in : in_)
            if (in.done < in.bytes) return;
        fence_.begin();
    }

    RunEnv env_;
    OpState& op_;
    std::vector<Out> out_;
    std::vector<In> in_;  // by rank
    const std::uint64_t show_limit_, read_bytes_;
    Ticket ticket_;
    bool over_ = false;  // a read did not count: this attempt gets nowhere
    Fence fence_;
};

}  // namespace

std::unique_ptr<Run> make_direct_run(RunEnv env, OpState& op, std::uint64_t show_limit, std::uint64_t read_bytes,
                                     std::uint64_t ticket) {
    return std::make_unique<DirectRun>(std::move(env), op, show_limit, read_bytes, ticket);
}

}  // namespace ftcomm
