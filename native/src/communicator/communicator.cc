// The communicator's operations: posting, starting, finishing, frames. Votes are in vote.cc, agree and shrink in agree.cc.
#include "communicator/communicator.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/reduce.h"

namespace ftcomm {

Communicator::Communicator(Core& core, CommSpec spec, bool claimed)
    : core_(core), spec_(std::move(spec)), claimed_(claimed), rank_(-1), p2p_(core, spec_, [this] {
          for (std::size_t i = 0; i < spec_.members.size(); ++i)
              if (spec_.members[i] == core_.self()) return static_cast<int>(i);
          return -1;
      }()) {
    rank_ = rank_of_slot(core_.self());
    FT_CHECK(rank_ >= 0, "communicator %s does not contain this rank", spec_.name.c_str());
    for (int m : spec_.members) {
        const auto& state = core_.view.members[static_cast<std::size_t>(m)];
        incarnations_.push_back(m == core_.self() ? core_.config.incarnation : state.incarnation);
    }
    decision_.alive = RankSet::first(static_cast<int>(spec_.members.size()));
    FT_POINT("comm.create");
}

void Communicator::claim(const CommSpec& spec) {
    claimed_ = true;
    spec_.name = spec.name;
    if (spec.timeout > 0) spec_.timeout = spec.timeout;
}

int Communicator::rank_of_slot(int slot) const {
    for (std::size_t i = 0; i < spec_.members.size(); ++i)
        if (spec_.members[i] == slot) return static_cast<int>(i);
    return -1;
}

Status Communicator::check(const OpDesc& d) const {
    const auto size = static_cast<int>(spec_.members.size());
    const auto n = static_cast<std::size_t>(size);
    if (d.root < 0 || d.root >= size)
        return Status::error(Code::Invalid, "root " + std::to_string(d.root) + " is not a rank of this communicator of size " +
                                                std::to_string(size));
    const bool reduces = d.kind == OpKind::AllReduce || d.kind == OpKind::Reduce || d.kind == OpKind::ReduceScatter;
    if (reduces && !reduce_supported(d.dtype, d.op))
        return Status::error(Code::Unsupported, std::string(to_string(d.op)) + " is not defined for " + to_string(d.dtype));
    for (const auto* v : {&d.send_counts, &d.send_offsets, &d.recv_counts, &d.recv_offsets})
        if (!v->empty() && v->size() != n)
            return Status::error(Code::Invalid, "counts and offsets need one entry per rank (" + std::to_string(size) +
                                                    "), got " + std::to_string(v->size()));
    return {};
}

Shape Communicator::shape_of(const OpDesc& d, Grid* grid) const {
    Shape s;
    s.kind = d.kind;
    s.dtype = d.dtype;
    s.root = d.root;
    s.factor = d.factor;
    const bool reduces = d.kind == OpKind::AllReduce || d.kind == OpKind::Reduce || d.kind == OpKind::ReduceScatter;
    if (reduces) s.op = d.op;
    const bool uneven = !(d.send_counts.empty() && d.recv_counts.empty());
    s.count = s.is_direct() && (uneven || d.kind == OpKind::AllToAll) ? 0 : d.count;
    if (s.is_direct()) s.count = 0;  // counts differ between ranks with and without per-rank counts; pairs check their own
    const auto n = static_cast<std::uint32_t>(spec_.members.size());
    const auto esize = size_of(d.dtype);
    const auto limit = core_.config.segment_bytes > 0 ? core_.config.segment_bytes : 64u << 10;
    const auto segment = std::min<std::uint64_t>(limit, core_.sender.max_payload()) / esize;
    const bool blocked = d.kind == OpKind::AllGather || d.kind == OpKind::ReduceScatter;
    *grid = Grid::make(blocked ? n : 1, s.is_direct() || d.kind == OpKind::Barrier ? 0 : d.count, segment);
    s.blocks = grid->blocks;
    s.per_block = grid->per_block;
    // C8: the same table on all ranks; what it says is part of the signature.
    const auto bytes = d.count * esize;
    const auto flat = core_.config.flat_limit > 0 ? core_.config.flat_limit : (n <= 4 ? 65536u : 16384u);
    s.algorithm = s.is_direct() ? Algorithm::Direct : Algorithm::Ring;
    if (d.kind == OpKind::AllReduce && d.algorithm != Algorithm::Ring &&
        bytes <= std::min<std::uint64_t>(d.algorithm == Algorithm::Flat ? ~0ull : flat, core_.sender.max_payload()))
        s.algorithm = Algorithm::Flat;
    return s;
}

RequestPtr Communicator::collective(const OpDesc& desc) {
    auto request = std::make_shared<Request>();
    if (auto s = check(desc); !s) {
        core_.finish(request, std::move(s));
        return request;
    }
    Grid grid;
    const auto shape = shape_of(desc, &grid);
    const auto seq = core_.solo ? 0 : next_seq_++;
    auto op = std::make_unique<OpState>(seq, desc, shape, grid, rank_, core_.rules.c8, request);
    if (desc.kind == OpKind::AllGather && desc.send != nullptr) {
        const auto bytes = desc.count * size_of(desc.dtype);
        auto* own = static_cast<std::byte*>(desc.recv) + static_cast<std::size_t>(rank_) * bytes;
        if (bytes > 0 && own != desc.send) std::memmove(own, desc.send, bytes);
    }
    if (core_.solo) {
        run_alone(*op, rank_, {}, true);
        RankSet self;
        self.add(rank_);
        request->outcome = op->outcome(rank_, self, core_.view.epoch);
        core_.finish(request, core_.dead_end());
        return request;
    }
    if (auto s = core_.dead_end(); !s) {  // nobody will ever vote here again
        core_.finish(request, std::move(s));
        return request;
    }
    const Time timeout = desc.timeout > 0 ? desc.timeout : spec_.timeout > 0 ? spec_.timeout : core_.config.timeout;
    op->deadline = core_.now + timeout;
    open_.push_back(std::move(op));
    pump();
    return request;
}

RequestPtr Communicator::send(const void* data, std::uint64_t bytes, int dst, std::int64_t tag) {
    auto request = std::make_shared<Request>();
    Status s = core_.dead_end();
    if (s && decision_.revoked) s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
    if (s && (dst < 0 || dst >= static_cast<int>(spec_.members.size())))
        s = Status::error(Code::Invalid, "destination " + std::to_string(dst) + " is not a rank of communicator " + spec_.name);
    if (s && core_.solo && dst != rank_)
        s = Status::error(Code::Unsupported, "this replacement is not admitted yet: no messages before its first join point");
    if (!s) {
        core_.finish(request, std::move(s));
    } else {
        p2p_.send(request, data, bytes, dst, tag);
    }
    return request;
}

RequestPtr Communicator::recv(void* data, std::uint64_t bytes, int src, std::int64_t tag) {
    auto request = std::make_shared<Request>();
    Status s = core_.dead_end();
    if (s && decision_.revoked) s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
    if (s && src >= static_cast<int>(spec_.members.size()))
        s = Status::error(Code::Invalid, "source " + std::to_string(src) + " is not a rank of communicator " + spec_.name);
    if (s && core_.solo && src != rank_)
        s = Status::error(Code::Unsupported, "this replacement is not admitted yet: no messages before its first join point");
    if (!s) {
        core_.finish(request, std::move(s));
    } else {
        const Time timeout = spec_.timeout > 0 ? spec_.timeout : core_.config.timeout;
        p2p_.recv(request, data, bytes, src < 0 ? -1 : src, tag, core_.now + timeout);
    }
    return request;
}

std::string Communicator::name_of(const OpState& op) const {
    return op.shape.text() + " #" + std::to_string(op.seq) + " of communicator " + spec_.name;
}

OpState* Communicator::current() const {
    if (!helpers_.empty()) return helpers_.front().get();
    return open_.empty() ? nullptr : open_.front().get();
}

void Communicator::pump() {
    if (pumping_) return;  // finishing an operation inside the loop comes back here
    pumping_ = true;
    // Hand-outs go on during an admission: a rank that needs one cannot come to the join point without it.
    while (!frozen_ && (!core_.admitting || !helpers_.empty())) {
        auto* op = current();
        if (op == nullptr || op->started) break;
        if (!start(*op)) continue;
        if (!frozen_ && wishes_now()) {  // given up while it was queued
            freeze();
            send_vote();
        }
        if (frozen_ || run_ == nullptr) continue;
        after_progress();
    }
    pumping_ = false;
}

bool Communicator::start(OpState& op) {
    op.started = true;
    if (auto s = core_.dead_end(); !s) {
        finish_current(std::move(s));
        return false;
    }
    const auto* plan = core_.rules.c5 ? decision_.plan_for(op.seq) : nullptr;
    if (plan != nullptr && op.request != nullptr) {
        if (plan->verdict == OpPlan::Verdict::Fail) {
            finish_current(plan->cause.status(name_of(op)));
            return false;
        }
        if (plan->shape.signature() != op.signature) {
            propose(Code::Mismatch, op.seq);
            return true;
        }
        FT_CHECK(plan->verdict == OpPlan::Verdict::Repair, "a plan says that operation %llu, not entered here, is complete",
                 static_cast<unsigned long long>(op.seq));
    }
    if (plan != nullptr) {
        start_run(op, plan->runs, true);
        return true;
    }
    // Not just `revoked`: what others had seen fail for another reason before the revocation fails for that reason here, too.
    if (op.seq >= decision_.revoked_from) {
        auto s =
            Status::error(Code::Revoked, name_of(op) + ": the communicator was revoked; agree() and shrink() still work on it");
        s.operation = name_of(op);
        s.epoch = core_.view.epoch;
        finish_current(std::move(s));
        return false;
    }
    if (op.seq >= decision_.fail_from) {
        finish_current(decision_.cause.status(name_of(op)));
        return false;
    }
    RankSet dead = RankSet::first(static_cast<int>(spec_.members.size())) - decision_.alive;
    auto fresh =
        default_plan(op.shape, static_cast<int>(spec_.members.size()), decision_.alive, dead, evidence(), core_.view.epoch);
    if (fresh.cause) {
        finish_current(fresh.cause->status(name_of(op)));
        return false;
    }
    start_run(op, std::move(fresh.runs), false);
    return true;
}

RunEnv Communicator::env() const {
    RunEnv e{core_.sender, spec_.members, spec_.id, attempt_, rank_, decision_.alive.list(), 0, core_.rules};
    e.position = e.position_of(rank_);
    FT_CHECK(e.position >= 0, "rank %d is not among the living of %s", rank_, spec_.name.c_str());
    return e;
}

void Communicator::start_run(OpState& op, std::vector<SegmentRun> plan, bool repair) {
    op.team = decision_.alive;
    op.ran = true;
    if (repair) {
        ++op.repairs;
        core_.host.trace("repair");
        FT_POINT("repair.start");
    }
    if (decision_.alive.count() == 1) {
        run_alone(op, rank_, plan, false);
        finish_current({});
        return;
    }
    if (op.shape.is_direct()) {
        run_ = make_direct_run(env(), op);
        core_.host.trace("run.direct");
    } else if (op.shape.algorithm == Algorithm::Flat && !repair) {
        run_ = make_flat_run(env(), op);
        core_.host.trace("run.flat");
    } else {
        run_ = make_ring_run(env(), op, std::move(plan), !repair || core_.rules.c3);
        core_.host.trace(repair ? "run.repair" : "run.ring");
    }
    run_->start();
    // What came before we were here; in order.
    std::vector<Stashed> now;
    for (auto it = stash_.begin(); it != stash_.end();) {
        if (it->header.attempt == attempt_ && it->header.seq == op.seq) {
            now.push_back(std::move(*it));
            it = stash_.erase(it);
        } else {
            ++it;
        }
    }
    for (auto& f : now) {
        if (run_ == nullptr || frozen_) return;
        if (f.header.aux != op.signature) {
            propose(Code::Mismatch, op.seq);
            return;
        }
        run_->on_frame(f.from, f.header, f.payload);
    }
}

void Communicator::on_collective(int from, const FrameHeader& h, ByteView payload) {
    if (core_.rules.m8 && h.attempt < attempt_) return;
    if (h.attempt == attempt_ && frozen_ && core_.rules.c1) return;  // C1: we have told what we hold
    auto* op = current();
    const bool running = op != nullptr && op->started && run_ != nullptr;
    if (running && h.seq == op->seq && (h.attempt == attempt_ || (!core_.rules.m8 && h.attempt < attempt_))) {
        if (h.aux != op->signature) {
            core_.host.trace("mismatch");
            propose(Code::Mismatch, op->seq);
            return;
        }
        run_->on_frame(from, h, payload);
        after_progress();
        return;
    }
    const auto finished = op != nullptr && op->started ? op->seq - 1 : done_seq_;
    if (h.attempt == attempt_ && !frozen_ && h.seq > shared_seq_ && h.seq <= done_seq_) {
        // It failed at once here (a dead root), yet a peer runs it: the peer called something else, and waits for us.
        core_.host.trace("mismatch.late");
        freeze();
        send_vote();  // it says that this rank is past the operation: the plan takes it for the disagreement it is
        return;
    }
    if (h.attempt <= attempt_ && h.seq <= finished) return;
    stash_.push_back({from, h, Bytes(payload.begin(), payload.end())});
}

void Communicator::after_progress() {
    if (run_ == nullptr) return;
    auto* op = current();
    if (run_->mismatch) {
        run_->mismatch = false;
        propose(Code::Mismatch, op->seq);
        return;
    }
    if (!run_->done()) return;
    if (op->repairs > 0) FT_POINT("repair.done");
    finish_current({});
    pump();
}

void Communicator::finish_current(Status status) {
    auto& queue = helpers_.empty() ? open_ : helpers_;
    auto op = std::move(queue.front());
    queue.pop_front();
    run_.reset();
    if (op->request == nullptr) return;  // a helper: the caller had its result long ago
    done_seq_ = op->seq;
    // One that failed at once (a dead root) was never shared work: the one before stays what the others may still need (C6).
    if (op->ran || status.ok()) shared_seq_ = op->seq;
    if (op->ran || status.ok())
        last_ =
            Last{op->seq, status.ok() ? OpVote::State::Complete : OpVote::State::Failed, op->shape, {}, op->grid, {}, nullptr};
    if (status.ok()) {
        op->request->outcome =
            op->outcome(rank_, op->team, core_.view.epoch);  // not those alive now: who returned before saw the same
        if (op->shape.algorithm == Algorithm::Flat && op->repairs == 0 && core_.rules.c6 && decision_.alive.count() > 1) {
            // C6: nobody waited for the others to have it, so it is kept until the next operation is through.
            const auto bytes = op->desc.count * size_of(op->desc.dtype);
            const auto* p = static_cast<const std::byte*>(op->desc.recv);
            last_.kept = std::make_shared<Bytes>(p, p + bytes);
            last_.labels = op->label_runs();
            last_.desc = op->desc;
            last_.desc.recv = last_.kept->data();
        }
        if (op->repairs > 0) {
            NodeEvent e;
            e.kind = NodeEvent::Kind::Repaired;
            e.comm = spec_.id;
            e.seq = op->seq;
            e.attempt = attempt_;
            e.ranks = op->request->outcome.contributors;
            e.text = name_of(*op);
            core_.event(std::move(e));
        }
    } else if (op->ran) {  // not for each of those that fail at once on a broken communicator
        NodeEvent e;
        e.kind = NodeEvent::Kind::Failed;
        e.comm = spec_.id;
        e.seq = op->seq;
        e.attempt = attempt_;
        e.ranks = RankSet::of(status.ranks);
        e.text = status.message;
        core_.event(std::move(e));
    }
    std::erase_if(proposals_, [&](const Proposal& p) { return p.seq != 0 && p.seq <= done_seq_; });
    bool others_run_it = false;
    if (!op->ran && !status.ok())
        for (const auto& f : stash_) others_run_it |= f.header.attempt == attempt_ && f.header.seq == op->seq;
    core_.finish(op->request, std::move(status));
    if (others_run_it && core_.dead_end()) {  // as in on_collective: a disagreement that came before we did
        core_.host.trace("mismatch.late");
        freeze();
        send_vote();
    }
}

void Communicator::on_writable(int slot) {
    p2p_.on_writable(slot);
    if (run_ != nullptr && !frozen_) {
        run_->on_writable(slot);
        after_progress();
    }
}

void Communicator::on_tick() {
    p2p_.on_tick(core_.now);
    if (open_.empty()) return;
    auto& op = *open_.front();
    if (op.started && !op.timeout_proposed && core_.now > op.deadline) {
        op.timeout_proposed = true;
        core_.host.trace("timeout");
        propose(Code::Timeout, op.seq);
    }
}

void Communicator::resume() { pump(); }

bool Communicator::fail_request(const RequestPtr& request, Code why) {
    for (auto& op : open_) {
        if (op->request != request) continue;
        propose(why, op->seq);
        return true;
    }
    if (agree_.active && agree_.request == request) return true;  // ends with the vote, never privately
    return p2p_.cancel(request);
}

void Communicator::fail_everything(const Status& status) {
    run_.reset();
    helpers_.clear();
    core_.sender.drop_collectives(spec_.id);
    while (!open_.empty()) finish_current(status);
    p2p_.fail_all(status);
    if (agree_.active) {
        agree_.active = false;
        core_.finish(agree_.request, status);
    }
}

void Communicator::on_dead_end() { fail_everything(core_.dead_end()); }

void Communicator::close() {
    closed_ = true;
    p2p_.fail_all(Status::error(Code::Closed, "communicator " + spec_.name + " was closed"));
}

RankSet Communicator::failed() const {
    RankSet all = RankSet::first(static_cast<int>(spec_.members.size()));
    RankSet out = all - in_view();
    for (int r : all.list())
        if (core_.left.has(spec_.members[static_cast<std::size_t>(r)])) out.add(r);
    return out;
}

void Communicator::ack_failed(int n) {
    for (int r : failed().list()) {
        if (n >= 0 && acked_.count() >= n) break;
        acked_.add(r);
    }
    p2p_.on_failures(failed(), acked_, evidence());
}

AdmitEntry Communicator::standing() const { return {spec_.id, attempt_, next_seq_, decision_.agree_seq, decision_.revoked}; }

bool Communicator::blocked_on(int slot) const {
    const int r = rank_of_slot(slot);
    if (r < 0 || !decision_.alive.has(r)) return false;
    return frozen_ || !open_.empty() || agree_.active || p2p_.waits_for(r);
}

}  // namespace ftcomm
