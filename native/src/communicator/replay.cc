// The policy replay: nothing is decided without a member that died; its replacement runs the program again, gets from its log what is
// known to be complete, and takes its predecessor's place in what is not.
//
// Every result of a rank, or its share of it, is in its log before the operation's fence begins, or, where there is no fence, before the
// call returns. So of anything that some rank has returned from, every rank either has the result in the logs of its host, or can be handed
// it by one that keeps it, or nobody is past it, and it is done again. Operations run strictly one after another: a log with result L
// says that all up to L - 1 are complete, and leaves open whether L is. That, the vote says (Decision::done_through).
#include <algorithm>

#include "base/check.h"
#include "base/failpoint.h"
#include "collectives/results.h"
#include "communicator/checkpoints.h"
#include "communicator/lost_logs.h"
#include "communicator/restore.h"

namespace ftcomm {

void Communicator::begin_replay() {
    checkpoints_ = std::make_unique<Checkpoints>(*this);
    lost_logs_ = std::make_unique<LostLogs>(*this);
    failures_.emplace(*core_.config.log, note_key(kFailures));
    if (auto s = find_what_was_heard(); !s) core_.abandoned = std::move(s).within("the log of communicator " + spec_.name);
    if (!lost_logs_->is_own_lost()) {
        read_log();
        return;
    }
    // Nothing of it is looked at before all of it is here.
    log_ = std::make_unique<PhasedLog>(*core_.config.log, core_.rules.l6);
    pairs_ = make_pairs(LoggedPairs::Channel::Messages);
    restore_ = std::make_unique<Restore>(*this);
    start_after_admissions();
    catching_up_ = true;
    freeze();
}

// Since when its log counts, and that of others; and who was given an answer, which is read later.
Status Communicator::find_what_was_heard() {
    if (core_.config.again)
        for (int part : {0, 1})
            if (auto s = core_.config.log->state({spec_.id, core_.self(), kHeard, part}); !s) return s;
    return lost_logs_->read();
}

void Communicator::read_log() {
    log_ = std::make_unique<PhasedLog>(*core_.config.log, core_.rules.l6);
    auto& log = *log_;
    if (auto s = find_what_is_logged(); !s) core_.abandoned = std::move(s).within("the log of communicator " + spec_.name);
    pairs_ = make_pairs(LoggedPairs::Channel::Messages);
    results_ = std::make_unique<ResultStream>(log, spec_, rank_);
    results_->look_at_hosts();
    logged_ = inherited_ = results_->last();
    start_after_admissions();
    if (!core_.config.again) {
        FT_CHECK(logged_ == 0, "the slot's first process finds %llu results in its log",
                 static_cast<unsigned long long>(logged_));
        return;
    }
    // L is complete, too, where somebody has left: who leaves has seen that all others are as far as itself.
    // A failure is on record only after it was decided for all.
    const auto newest = results_->entry(logged_);
    const bool failed = (newest && newest->failed) || failures_->newest() >= logged_;
    const bool complete = anybody_left() || !core_.rules.l12 || failed;
    served_ = std::min(logged_ == 0 || complete ? logged_ : logged_ - 1, logged_whole());
    served_ = std::max(served_, checkpoints_->proven());
    catching_up_ = true;
    if (served_ > 0) last_ = last_from_log(served_);
    freeze();  // nothing starts before a vote has said where the others stand
}

std::unique_ptr<LoggedPairs> Communicator::make_pairs(LoggedPairs::Channel channel) {
    const bool in_groups = channel == LoggedPairs::Channel::Messages && !core_.view.groups.empty();
    return std::make_unique<LoggedPairs>(
        core_, spec_, rank_, channel, *log_, lost_logs_->since(), catching_up_, [this] { caught_up(); },
        in_groups ? &p2p_ : nullptr);
}

LoggedRing& Communicator::ring() {
    if (ring_ == nullptr) {
        ring_ = std::make_unique<LoggedRing>(core_, spec_, rank_, make_pairs(LoggedPairs::Channel::Ring));
        if (!core_.solo) ring_->pairs().on_view();  // the others may not know what its predecessor has sent
    }
    return *ring_;
}

// A log that cannot be read is not an empty one: to run as if nothing had been done would be another history.
Status Communicator::find_what_is_logged() {
    if (!core_.config.again) return {};
    auto& log = *core_.config.log;
    for (int what : {kMarks, kFailures})
        if (auto s = log.state(note_key(what)); !s) return s;
    if (auto s = checkpoints_->find_resume_point(); !s) return s;
    for (int what : {kResults, kAnswers})
        if (auto s = log_->state(note_key(what)); !s) return s;
    for (int slot : spec_.members) {
        if (core_.view.same_group(core_.self(), slot)) continue;
        if (auto s = log_->state({spec_.id, core_.self(), slot}); !s) return s;
        if (auto s = log_->state({spec_.id, slot, core_.self()}); !s) return s;
    }
    LogRecord record;
    if (const auto last = log_->last(note_key(kResults)); last > 0)
        if (auto s = log_->find(note_key(kResults), last, &record); !s) return s;
    if (auto s = failures_->read(); !s) return s;
    if (const auto from = failures_->revoked_from()) {
        decision_.revoked = true;
        decision_.revoked_from = *from;
    }
    return {};
}

bool Communicator::anybody_left() const {
    return std::any_of(spec_.members.begin(), spec_.members.end(), [&](int slot) {
        const auto& m = core_.view.members[static_cast<std::size_t>(slot)];
        return !m.alive && m.evidence == Evidence::Left;
    });
}

bool Communicator::present() const {
    for (std::size_t r = 0; r < spec_.members.size(); ++r) {
        const auto& m = core_.view.members[static_cast<std::size_t>(spec_.members[r])];
        if (m.alive ? m.incarnation != incarnations_[r] : m.evidence != Evidence::Left) return false;
    }
    return true;
}

// --- results

bool Communicator::log_result(const OpState& op) {
    if (!log_error_) return is_settled(op.seq);
    log_error_ = results_->add(op);
    if (log_error_) logged_ = std::max(logged_, op.seq);
    return log_error_ || is_settled(op.seq);
}

void Communicator::log_failure(const OpState& op, const Status& status) {
    if (!dead_end()) return;
    const auto c = Cause::of(status);
    auto known = c;
    if (const auto name = name_of(op) + ": "; c.message.starts_with(name)) known.message.erase(0, name.size());
    // One that fails at once because of a revocation needs no record: the revocation has one.
    if (op.seq < decision_.revoked_from) failures_->note(op.seq, known);
    const bool results_end_here = op.seq == results_->last() + 1;  // else its result is there: that record stays what it is
    if (results_end_here && results_->add_failure(op, c)) logged_ = op.seq;
}

// A vote has shown which operations are complete: what the log has of them may be served, and is what this rank votes with next. The last
// may be one without a fence, of which not all have logged their share: then it is in the plan, handed out or done again.
void Communicator::learn_complete(const Decision& d) {
    auto here = logged_whole();
    while (here < logged_ && d.plan_for(here + 1) == nullptr) ++here;
    served_ = std::max(served_, std::min(here, d.done_through));
    if (last_.seq < served_) last_ = last_from_log(served_);
    serve_logged();
}

void Communicator::serve_logged() {
    while (!open_.empty() && !open_.front()->started && open_.front()->seq <= served_) {
        auto& op = *open_.front();
        FT_POINT("replay.serve");
        const auto* cause = failures_->of(op.seq);  // also where its result is in the log
        if (cause == nullptr) op.make_room();
        auto status = cause != nullptr ? cause->status(name_of(op)) : results_->read(op);
        if (status.code == Code::ReplayDiverged) status.operation = name_of(op);
        if (status) {
            ++replayed_;
            mark_complete(op, rank_, static_cast<int>(spec_.members.size()));
            op.outcome(rank_, RankSet::first(static_cast<int>(spec_.members.size())), core_.view.epoch, &op.request->outcome);
            op.give();
        }
        done_seq_ = op.seq;
        const auto request = op.request;
        open_.pop_front();
        core_.finish(request, std::move(status));
    }
}

LastResult Communicator::last_from_log(std::uint64_t seq) {
    LastResult last;
    const auto entry = results_->entry(seq);
    if (!entry) return last;
    last.seq = seq;
    last.shape = entry->shape;
    last.logged = !entry->failed;
    if (!last.logged) {
        last.state = OpVote::State::Failed;
        return last;
    }
    last.desc.kind = last.shape.kind;
    last.desc.dtype = last.shape.dtype;
    last.desc.op = last.shape.op;
    last.desc.root = last.shape.root;
    last.desc.count = last.shape.count;
    last.desc.factor = last.shape.factor;
    last.desc.algorithm = last.shape.algorithm;
    const auto size = static_cast<int>(spec_.members.size());
    if (last.shape.is_direct()) return last;
    // Run by other limits than now: nothing here can say what it left. Whoever calls it is told so (ResultStream::read).
    if (!(calls_.shape_of(last.desc, &last.grid) == last.shape)) return {};
    OpState op(seq, last.desc, last.shape, last.grid, rank_, calls_.signature_of(last.shape), nullptr);
    mark_complete(op, rank_, size);
    last.labels = op.label_runs();
    last.desc = op.desc;
    return last;
}

// --- who is there

void Communicator::on_view_replay() {
    freeze_sent_ = false;
    if (restore_ != nullptr) {  // it has no vote yet
        restore_->on_view();
        return;
    }
    // A second death would cost this rank, too, what is late: it would be computed again. If the log is full, a send says so.
    (void)core_.config.log->flush();
    if (!present() || !(decision_.alive - in_view()).empty()) freeze();
    for_pairs([](LoggedPairs& pairs) { pairs.on_view(); });
    checkpoints_->on_view();
    if (frozen_) send_vote();
}

// From the view alone, not from which admissions were seen: a rank may hear of two at once, and only one of them be the communicator's.
void Communicator::start_after_admissions() {
    for (int slot : spec_.members) since_ = std::max(since_, core_.view.members[static_cast<std::size_t>(slot)].admission);
    if (since_ == 0) return;
    freeze();
    attempt_ = std::max(attempt_, first_attempt(since_));
    decision_.attempt = attempt_;
}

// A member is back, as a new process: all start a new attempt, and vote on it.
void Communicator::on_returned(const RankSet& came) {
    core_.host.trace("replay.returned");
    freeze_sent_ = false;
    if (!helpers_.empty()) drop_run();  // a helper's
    helpers_.clear();
    // Wished for while nothing could be decided: the one that all waited for is back.
    std::erase_if(proposals_, [](const Proposal& p) { return p.code == Code::Timeout; });
    for (auto& op : open_) op->timeout_proposed = false;
    start_after_admissions();
    if (results_ != nullptr) results_->look_at_hosts();
    decision_.alive = RankSet::first(static_cast<int>(spec_.members.size()));
    decision_.plans.clear();
    if (!open_.empty()) open_.front()->started = false;
    for (int r : came.list()) ballot_.forget(r);
    ballot_.forget_through(attempt_);
    std::erase_if(stash_, [&](const Stashed& f) { return f.header.attempt <= attempt_; });
}

// A timeout is for those who could go on and do not. Restarted, not stopped: a death that nobody replaces, or a replacement that hangs,
// still ends what waits.
void Communicator::restart_timers() {
    if (!replays()) return;
    for (auto& op : open_) op->deadline = std::max(op->deadline, core_.now + op->timeout);
    const Time deadline = patience_ = core_.now + timeout();
    for_pairs([&](LoggedPairs& pairs) { pairs.postpone(deadline); });
    checkpoints_->postpone(deadline);
    if (ring_ != nullptr) ring_->postpone();
}

RankSet Communicator::dead_in(const JobView& view) const {
    RankSet dead;
    for (std::size_t r = 0; r < spec_.members.size(); ++r) {
        const auto& m = view.members[static_cast<std::size_t>(spec_.members[r])];
        if (!m.alive && m.evidence != Evidence::Left) dead.add(static_cast<int>(r));
    }
    return dead;
}

// Nothing is decided without the dead, and so no failure either: who does not wait on is as good as dead itself, and what comes in its
// place waits again. It leaves the view, as its process may go on living: the others would wait for its votes.
void Communicator::give_up_on_the_dead(Code why) {
    if (!replays() || !frozen_ || core_.solo || at_dead_end() || !core_.gives_up) return;
    const auto dead = dead_in(core_.view);
    if (dead.empty()) return;
    auto cause =
        peer_failure(dead, evidence(), core_.view.epoch,
                     why == Code::PeerFailure ? "no replacement came within the timeout. Nothing is decided without it: start it "
                                                "and this process again, or raise the timeout"
                                              : "while it is, nothing is decided: start it and this process again");
    cause.code = why;
    core_.host.trace("replay.give_up");
    core_.gives_up = cause.status(open_.empty() ? spec_.name : name_of(*open_.front()));
}

std::uint64_t Communicator::replay_progress() const {
    if (!replays() || !catching_up_) return 0;
    if (restore_ != nullptr) return restore_->progress();
    auto done = replayed_;
    for (const auto* pairs : {pairs_.get(), ring_ != nullptr ? &ring_->pairs() : nullptr}) {
        if (pairs == nullptr) continue;
        done += pairs->replayed();
        for (auto n : pairs->position().received) done += n;
    }
    return done;
}

// The first operation that is not in the log.
void Communicator::caught_up() {
    if (done_seq_ < served_) return;  // a late message was lost with the process; later results were not
    if (!std::exchange(catching_up_, false)) return;
    FT_POINT("replay.live");
    NodeEvent e;
    e.kind = NodeEvent::Kind::CaughtUp;
    e.comm = spec_.id;
    e.seq = done_seq_;
    e.text = std::to_string(replayed_) + " results and " + std::to_string(pairs_->replayed()) + " sends were in the log";
    core_.event(std::move(e));
}

}  // namespace ftcomm
