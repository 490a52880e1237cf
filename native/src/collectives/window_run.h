// What runs by windows have in common. Ranks that share the processors of one host put what they have into windows of shared memory, a chunk at a
// time, and take what they need out of those of the others: what is passed on stays in the caches that they share. (Parsons and Pai 2014; Jain et
// al., "Framework for scalable intra-node collective operations using shared memory", 2018.)
//
// A run goes in steps, and a step in tasks, each with a piece for every rank. Nobody begins a step before all are through with the one before;
// so two sets of places for what is shown are enough, chunk after chunk: who writes to one knows that all have left what was there. (Each
// rank says how many it uses, and from which one on: SharedWriter::goes_round.) Who shows nothing waits in the first step for nothing but
// what the others show. The last step has no end of its own, but the fence after it.
//
// All of that is on the ranks' boards. To find those they tell each other of them once, in the first operation by windows since they
// last agreed who takes part: by StageEnter, of which all are awaited then. Later it says that its sender waits, and has done so for long:
// who has called something else, of which nobody hears (it failed at once, for a dead root), hears of this one.
//
// A window is written by its rank only (M9), and looked into by ranks that may have been stopped meanwhile: as of a rank that is read (C9),
// what was copied counts only if the ticket in the window still stands.
#pragma once

#include <optional>
#include <vector>

#include "base/copy.h"
#include "collectives/run.h"
#include "collectives/ticket.h"

namespace ftcomm {

class WindowRun : public Run {
public:
    WindowRun(RunEnv env, OpState& op, std::uint64_t ticket);
    ~WindowRun() override;

    void start() override;
    void on_frame(int from, const FrameHeader& h, ByteView payload) override;
    void on_tick() override;
    bool has_work() const override { return (task_ >= 0 || lacks_room_) && !over_; }
    void work() override;  // one piece: ticks and other communicators get their turn in between
    bool done() const override { return done_; }
    const char* phase() const override {
        return step_ == 0 ? "the others to enter" : !is_fence() ? "data" : "the completion fence";
    }

protected:
    struct Form {
        std::uint32_t last_step = 0;
        std::uint64_t place = 0, places = 0;  // bytes of one of the places in a window, and how many a chunk has
        RankSet showing;  // positions that put something into theirs
        int looking = kAll;  // the position of who looks there
    };
    static constexpr int kAll = -1;
    static constexpr std::uint64_t kLine = 64;
    // Inputs twice, and results: of sixteen ranks in segments of 64 KiB, or of three whose pieces are a third of 512 KiB.
    static constexpr std::uint64_t kWindow = Transport::kWindowHead + (2u << 20) + (512u << 10);
    static constexpr std::uint64_t kInCaches = 8u << 20;  // of all results: what is more is written past them

    virtual Form form() = 0;
    virtual int tasks() const = 0;  // of every step
    virtual bool is_due(int task, int position) = 0;
    virtual void do_piece(int task, int position) = 0;

    static std::uint64_t in_lines(std::uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
    // One of a chunk's places in this rank's window, and in another's.
    std::byte* own_place(std::uint32_t chunk, std::uint64_t number) {
        return window_.memory + offset(self().sets, chunk, number);
    }
    const std::byte* place(int position, std::uint32_t chunk, std::uint64_t number) const {
        const auto& peer = peers_[static_cast<std::size_t>(position)];
        return peer.window + offset(peer.sets, chunk, number);
    }
    // Of all ranks, of so many elements each.
    Into into_results(std::uint64_t elements) const {
        return into_for(elements * size_of(op_.desc.dtype) * peers_.size(), kInCaches);
    }
    bool stands(int position);  // C9. Loads of the window are not moved behind it.
    void give_up() { over_ = true; }  // a ticket has fallen: this attempt gets nowhere

    RunEnv env_;
    OpState& op_;
    std::uint32_t step_ = 0;

private:
    struct Peer {
        const std::byte* window = nullptr;  // it shows this
        Board::Sets sets;
        std::uint64_t ticket = 0;  // 0: it has not been seen here yet
    };
    Peer& self() { return peers_[static_cast<std::size_t>(env_.position)]; }
    bool is_fence() const { return step_ > form_.last_step; }
    std::uint64_t set_bytes() const { return form_.places * form_.place; }
    std::uint32_t most_sets() const { return static_cast<std::uint32_t>((kWindow - Transport::kWindowHead) / set_bytes()); }
    std::uint64_t offset(const Board::Sets& sets, std::uint32_t chunk, std::uint64_t number) const {
        const auto set = (sets.first + chunk) % sets.count;
        return Transport::kWindowHead + set * set_bytes() + number * form_.place;
    }
    bool take_window();
    void skip();
    void end_step();
    void arrive();
    void go_on();
    bool all_meet() const { return step_ > 0 || introduces_; }
    bool is_awaited(int position) const;
    bool waits(int position) const;
    std::optional<std::uint32_t> progress(int position);  // the last step that it is through with, if it is here
    bool is_through(int position);
    bool sees_all_through();
    void tell_those_who_wait();
    void tell_of_board();
    void send(int position, FrameKind kind, ByteView payload = {});

    const std::uint64_t number_;
    Transport::Window window_;
    std::optional<Ticket> ticket_;
    std::vector<Peer> peers_;  // by position
    Form form_;
    bool introduces_ = false;  // the boards are made known
    bool all_through_ = false;  // with this rank's step
    int task_ = -1;  // none: it waits
    int at_ = 0;  // the position whose piece it is
    int ticks_ = 0;  // that it has waited in this step
    bool lacks_room_ = false;  // for this rank's window, or its board: work() says so
    bool over_ = false, done_ = false;
};

// Where the grid is cut by a plan: what each position owns or holds, in pieces of so many segments. A chunk is a piece of every share.
class Shares {
public:
    struct Piece {
        std::uint32_t segment = 0, segments = 0;
    };
    // A chunk has up to so many pieces as long.
    void lay_out(const RunEnv& env, const OpState& op, const std::vector<SegmentRun>& plan, std::size_t pieces);
    Piece piece(std::uint32_t chunk, int position) const;
    std::uint32_t chunks() const { return chunks_; }
    std::uint64_t place() const { return place_; }  // bytes of the longest piece, in whole lines
    RankSet owners() const;  // positions with a share
    static std::size_t bytes(const OpState& op, const Piece& p) {
        return op.grid.count(p.segment, p.segments) * size_of(op.desc.dtype);
    }
    static void set_final(OpState& op, const Piece& p, const RankSet& contributors) {
        for (std::uint32_t s = p.segment; s < p.segment + p.segments; ++s) op.set_final(s, contributors);
    }

private:
    struct Share {
        std::uint32_t first = 0, segments = 0;
    };
    std::vector<Share> shares_;  // by position
    std::uint32_t batch_ = 1, chunks_ = 0;
    std::uint64_t place_ = 0;
};

}  // namespace ftcomm
