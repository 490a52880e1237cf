// A communicator's operations, one after another: start, run, frames, finish.
#include "base/check.h"
#include "base/failpoint.h"
#include "collectives/results.h"
#include "communicator/communicator.h"

namespace ftcomm {

OpState* Communicator::current() const {
    if (!helpers_.empty()) return helpers_.front().get();
    return open_.empty() ? nullptr : open_.front().get();
}

void Communicator::pump() {
    if (pumping_) return;  // finishing an operation inside the loop comes back here
    pumping_ = true;
    if (replays()) serve_logged();
    // Hand-outs go on during an admission: a rank that needs one cannot come to the join point without it.
    while (!frozen_) {
        auto* op = current();
        if (op == nullptr || op->started) break;
        if (core_.admitting && helpers_.empty() && op->seq >= held_from_) break;
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

// The others are told by a code only what went wrong in a rank: it says the rest itself.
Status Communicator::failed_for(const Cause& cause, const OpState& op) const {
    auto s = cause.status(name_of(op));
    if (!log_error_) s.message += ". Here: " + log_error_.message;
    return s;
}

bool Communicator::start(OpState& op) {
    op.started = op.entered = true;
    if (at_dead_end()) {
        finish_current(dead_end());
        return false;
    }
    if (const auto* cause = replays() ? failures_->of(op.seq) : nullptr) {
        finish_current(failed_for(*cause, op));
        return false;
    }
    const auto* plan = core_.rules.c5 ? decision_.plan_for(op.seq) : nullptr;
    if (plan != nullptr && op.request != nullptr) {
        if (plan->verdict == OpPlan::Verdict::Fail) {
            finish_current(failed_for(plan->cause, op));
            return false;
        }
        if (op.shape.is_same_exchange(plan->shape)) {
            core_.host.trace("exchange.direct");
            op.go_directly(calls_.signature_of(plan->shape));
        }
        if (calls_.signature_of(plan->shape) != op.signature) {
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
    const auto dead = all_alive() ? RankSet{} : RankSet::first(static_cast<int>(spec_.members.size())) - decision_.alive;
    if (replays()) {
        if (!dead.empty()) {  // who left has called everything that it wanted to
            finish_current(peer_failure(dead, evidence(), core_.view.epoch, "it left before this operation").status(name_of(op)));
            return false;
        }
        caught_up();
    }
    if (op.shape.algorithm == Algorithm::Flat && dead.empty() && living_.size() > 1) {  // what it does needs no plan
        start_run(op, {}, false);
        return true;
    }
    auto fresh =
        default_plan(op.shape, static_cast<int>(spec_.members.size()), decision_.alive, dead, evidence(), core_.view.epoch);
    if (fresh.cause) {
        if (op.request != nullptr) unrun_.add(op.seq);
        finish_current(fresh.cause->status(name_of(op)));
        return false;
    }
    for (const auto& r : fresh.runs)
        if (r.mode == SegmentMode::Absent) core_.host.trace("run.absent");
    start_run(op, std::move(fresh.runs), false);
    return true;
}

void Communicator::start_run(OpState& op, std::vector<SegmentRun> plan, bool repair) {
    FT_CHECK(run_ == nullptr, "%s begins while another operation runs", name_of(op).c_str());  // they share their memory
    FT_CHECK(!core_.rules.c10 || !core_.sender.has_lent(spec_.id), "%s begins, and memory of another one is lent",
             name_of(op).c_str());
    op.team = decision_.alive;
    op.ran = true;
    if (repair) {
        ++op.repairs;
        core_.host.trace("repair");
        FT_POINT("repair.start");
    }
    const bool whole = all_alive();
    const bool flat = op.shape.algorithm == Algorithm::Flat && living_.size() > 1 &&
                      (op.shape.runs_as() == OpKind::AllReduce || whole) &&
                      (!repair || (replays() && core_.rules.l7 && is_done_again(op, plan)));
    if (!flat) op.make_room();
    if (living_.size() == 1) {
        op.bring_in();
        run_alone(op, static_cast<int>(spec_.members.size()), rank_, plan, false);
        if (put_on_record(op)) finish_current({});
        return;
    }
    // Before its input is sent, with which others may complete it: then all have to, and whoever comes later needs this rank's share.
    if (replays() && op.shape.algorithm == Algorithm::Flat && log_error_ && op.request != nullptr)
        log_error_ = results_->make_room(op);
    if (!log_error_ && op.shape.algorithm == Algorithm::Flat && !is_settled(op.seq)) {
        put_on_record(op);
        return;
    }
    run_ = make_run(op, std::move(plan), repair, flat);
    after_flat_ = flat;
    if (!run_->brings_in()) op.bring_in();
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
    core_.has_work |= run_ != nullptr && run_->has_work();
}

// The memory is another communicator's soon. Who was late for the last operation has not looked yet; who is past it throws this away.
void Communicator::send_what_is_shown() {
    const auto last = posts_.last(spec_.id);
    if (!last || last->key.attempt != attempt_) return;  // all have voted since
    FrameHeader h;
    h.kind = FrameKind::Flat;
    h.attempt = last->key.attempt;
    h.comm = last->key.comm;
    h.seq = last->key.seq;
    h.aux = last->key.signature;
    for (int r : voters().list())
        if (r != rank_) core_.sender.send(slot_of(r), h, last->input);
}

void Communicator::look() {
    if (run_ == nullptr || frozen_) return;
    run_->look();
    after_progress();
}

void Communicator::halt() {
    drop_run();
    p2p_.halt();
    frozen_ = true;  // nothing starts any more
}

// What was only left to this rank itself is done. True: the operation is, with that, and those who have returned from it may be gone.
bool Communicator::settle_run() {
    if (run_ == nullptr || run_->done()) return false;
    run_->settle();
    return run_->done() && !replays();
}

void Communicator::drop_run() {
    // The result of one that is over, and could not be logged, may lie in the memory of flat runs.
    if (run_ != nullptr && run_->done()) current()->make_room();
    run_.reset();
    words_changed();
    core_.sender.drop_collectives(spec_.id);
    take_back(false);
}

// C10: the memory of an operation is its caller's from now on. has_come: all of it that was sent, as its fence has told.
void Communicator::take_back(bool has_come) {
    if (core_.rules.c10) core_.sender.take_back(spec_.id, has_come);
}

bool Communicator::work() {
    bool more = p2p_.work();
    if (replays()) for_pairs([&](LoggedPairs& pairs) { more |= pairs.work(); });
    if (run_ == nullptr || frozen_ || !run_->has_work()) return more;
    run_->work();
    after_progress();
    return more || (run_ != nullptr && !frozen_ && run_->has_work());
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
        core_.has_work |= run_ != nullptr && run_->has_work();
        return;
    }
    const auto finished = op != nullptr && op->started ? op->seq - 1 : done_seq_;
    if (h.attempt == attempt_ && !frozen_ && unrun_.has(h.seq)) {
        // It failed at once here (a dead root), yet a peer runs it: the peer called something else, and waits for us.
        core_.host.trace("mismatch.late");
        freeze();
        send_vote(true);  // it says that this rank is past the operation: the plan takes it for the disagreement it is
        return;
    }
    if (h.attempt <= attempt_ && h.seq <= finished) return;
    stash_.push_back({from, h, Bytes(payload.begin(), payload.end())});
}

void Communicator::after_progress() {
    words_changed();
    if (run_ == nullptr) return;
    auto* op = current();
    if (run_->mismatch) {
        run_->mismatch = false;
        propose(Code::Mismatch, op->seq);
        return;
    }
    if (run_->refused) {
        run_->refused = false;
        propose(kUnreadable, op->seq);
        return;
    }
    if (run_->no_window) {
        run_->no_window = false;
        propose(kNoWindow, op->seq);
        return;
    }
    if (!run_->done() && (log_error_ || is_settled(op->seq))) return;
    if (!put_on_record(*op)) return;
    if (op->repairs > 0) FT_POINT("repair.done");
    finish_current({});
    pump();
}

// Here, if it has no fence; else before that. (One without that is done again is compared with what is there.)
bool Communicator::put_on_record(const OpState& op) {
    const bool compared = op.shape.algorithm == Algorithm::Flat && run_ != nullptr && run_->done();
    if (log_error_ && replays() && op.request != nullptr && (op.seq > logged_ || compared)) log_result(op);
    if (log_error_ || is_settled(op.seq)) return true;
    const bool means_something_else = log_error_.code == kUnreadable || log_error_.code == kNoWindow;
    propose(means_something_else ? Code::LogFull : log_error_.code, op.seq);
    return false;
}

// Somebody has returned from it: it is completed here, too, whether it can be logged or not. The next operation says so.
bool Communicator::is_settled(std::uint64_t seq) const {
    const auto* plan = decision_.plan_for(seq);
    return plan != nullptr && plan->verdict == OpPlan::Verdict::Repair && plan->settled;
}

void Communicator::finish_current(Status status) {
    auto& queue = helpers_.empty() ? open_ : helpers_;
    auto op = std::move(queue.front());
    queue.pop_front();
    const auto* kept = run_ != nullptr && status.ok() ? run_->kept() : nullptr;
    if (kept != nullptr && run_->is_reusable()) idle_flat_ = std::move(run_);
    else if (run_ != nullptr) {
        take_back(status.ok() && run_->all_have_come());
        run_.reset();
    }
    if (op->request == nullptr) return;  // a helper: the caller had its result long ago
    done_seq_ = op->seq;
    // Who returns from an operation has seen that all have begun it, and so have logged the one before: if a process of this slot
    // had, the log that this one began with, or has had again of the others, would be as long as that.
    core_.beyond_others |= status.ok() && replays() && spec_.members.size() > 1 && op->seq > inherited_ + 1;
    // All that live have begun it, and so are past those before.
    if (status.ok() && op->ran && op->shape.runs_as() == OpKind::AllReduce && op->grid.segments() > 0) unrun_.clear();
    // One that failed at once (a dead root) was never shared work: the one before stays what the others may still need (C6).
    if (kFaultTolerant && (op->ran || status.ok())) {
        last_.begin(op->seq, status.ok() ? OpVote::State::Complete : OpVote::State::Failed, *op);
    }
    if (status.ok()) {
        // Not of those alive now: who returned before saw the same.
        op->outcome(rank_, op->team, core_.view.epoch, &op->request->outcome);
        op->give();
        keep_result(*op, kept);
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
    if (closed_) keep_apart();
    if (replays() && !status.ok()) log_failure(*op, status);
    if (!proposals_.empty()) std::erase_if(proposals_, [&](const Proposal& p) { return p.seq != 0 && p.seq <= done_seq_; });
    bool others_run_it = false;
    if (!op->ran && !status.ok())
        for (const auto& f : stash_) others_run_it |= f.header.attempt == attempt_ && f.header.seq == op->seq;
    core_.finish(op->request, std::move(status));
    op->request = nullptr;  // its owner may want to be the last to hold it
    spare_op_ = std::move(op);
    if (others_run_it && dead_end()) {  // as in on_collective: a disagreement that came before we did
        core_.host.trace("mismatch.late");
        freeze();
        send_vote(true);
    }
}

}  // namespace ftcomm
