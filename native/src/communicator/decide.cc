// Decide, record, announce, apply: from a full set of votes to the next attempt. What is in the head cell holds (M1, M2, M4).
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/joined.h"
#include "communicator/agree.h"
#include "communicator/announce.h"
#include "communicator/lost_logs.h"

namespace ftcomm {

void Communicator::try_decide() {
    if (!frozen_ || cas_busy_ || excluded_ || leader() != rank_ || !dead_end() || (replays() && !present())) return;
    const auto want = voters();
    auto missing = want - ballot_.voters(attempt_ + 1);
    if (!missing.empty()) {
        if (!freeze_sent_) {
            freeze_sent_ = true;
            missing.remove(rank_);
            announcements_->spread_to(missing, FrameKind::Freeze, spec_and({}));
        }
        return;
    }
    const auto votes = ballot_.of(want, attempt_ + 1);
    if (replays() && lost_logs_->has_older(votes)) return;
    FT_POINT("vote.plan");
    PlanInput in{spec_, decision_, votes, failed(), evidence(), core_.view.epoch, core_.rules};
    auto d = make_decision(in);
    d.admissions = core_.view.admissions;
    d.nonce = core_.random();
    auto bytes = d.encode();
    cas_busy_ = true;
    core_.host.trace("decide");
    FT_POINT("decide.before");
    core_.cells.compare_and_set(cell_key(), record_, bytes, [this, bytes](CellClient::Result result, const Bytes& value) {
        on_decide_reply(result, value, bytes);
        agreeing_->try_to();  // votes for either may have come in while the cell was busy
        try_decide();
    });
    if (!core_.rules.m4) {  // rule M4 switched off: act before it is recorded
        announcements_->announce(bytes, FrameKind::Decision);
        adopt(bytes);
    }
}

void Communicator::on_decide_reply(CellClient::Result result, const Bytes& value, const Bytes& mine) {
    cas_busy_ = false;
    if (!dead_end()) return;  // voted out meanwhile: everything has failed already
    if (result == CellClient::Result::Conflict && !core_.rules.m1) result = CellClient::Result::Swapped;
    if (result == CellClient::Result::Lost) {
        core_.authority_lost = true;
        return;  // the node fails everything after this input
    }
    if (result == CellClient::Result::Swapped) {
        FT_POINT("decide.after");
        announcements_->announce(mine, FrameKind::Decision);
        adopt(mine);
        return;
    }
    core_.host.trace("decide.conflict");
    const auto current = Decision::decode(value);
    FT_CHECK(current.has_value(), "the head cell of communicator %s does not hold a decision", spec_.name.c_str());
    if (outdated(*current)) {
        core_.host.trace("decide.outdated");
        record_ = value;  // of members that have been replaced since
        try_decide();
        return;
    }
    if (excludes_this_rank(*current)) {
        on_excluded();
        return;
    }
    if (current->attempt > attempt_ && core_.rules.m2) {
        announcements_->announce(value, FrameKind::Decision);  // its leader may have died before it could
        adopt(value);
        return;
    }
    // Only an agree (or, for a replacement, older attempts) came between: carry it forward and try again.
    take_agreed(*current, value);
    try_decide();
}

void Communicator::read_cell() {
    if (cell_reading_) {  // it may be answered with what was there before the news that asks now
        read_again_ = true;
        return;
    }
    cell_reading_ = true;
    core_.cells.read(cell_key(), [this](CellClient::Result result, const Bytes& value) {
        cell_reading_ = false;
        if (result == CellClient::Result::Lost) {
            core_.authority_lost = true;
            return;
        }
        if (!value.empty()) adopt(value);
        if (std::exchange(read_again_, false)) read_cell();
    });
}

// It would conflict again and again until it hears the view.
void Communicator::on_excluded() {
    core_.host.trace("decide.excluded");
    excluded_ = true;
    core_.wants_view = true;
}

// A record from the cell, whoever brought it. Records are ordered by (attempt, agree number); older ones change nothing.
void Communicator::adopt(const Bytes& record) {
    auto d = Decision::decode(record);
    FT_CHECK(d.has_value(), "an undecodable decision for communicator %s", spec_.name.c_str());
    if (outdated(*d) || !dead_end()) return;  // what others decide after a rank is out is not for it
    if (d->admissions > core_.view.admissions) {  // first the admission, then what was decided after it
        core_.host.trace("decide.ahead");
        ahead_ = record;
        core_.wants_view = true;
        return;
    }
    if (excludes_this_rank(*d)) return;  // it is out of the job; the view says so
    if (d->attempt > attempt_) {
        FT_CHECK(d->attempt == attempt_ + 1 || !core_.rules.m4, "attempt %u decided without this rank, which is at %u",
                 d->attempt, attempt_);
        record_ = record;
        apply(*d);
        return;
    }
    if (d->agree_seq > decision_.agree_seq) take_agreed(*d, record);
}

void Communicator::take_agreed(const Decision& d, const Bytes& record) {
    decision_.agree_seq = d.agree_seq;
    decision_.agree_value = d.agree_value;
    decision_.agree_cause = d.agree_cause;
    decision_.agree_survivors = d.agree_survivors;
    record_ = record;
    agreeing_->finish();
}

void Communicator::apply(const Decision& d) {
    FT_POINT("decide.apply");
    core_.host.trace("apply");
    freeze(false);  // a decision may arrive before the news that made it: this rank's vote was in it all the same
    const bool agreed = d.agree_seq > decision_.agree_seq;
    attempt_ = d.attempt;
    decision_ = d;
    frozen_ = false;
    freeze_sent_ = false;
    drop_run();
    board_.forget();
    helpers_.clear();
    ballot_.forget_through(attempt_);
    std::erase_if(stash_, [&](const Stashed& f) { return f.header.attempt < attempt_; });
    NodeEvent e;
    e.kind = NodeEvent::Kind::Decided;
    e.comm = spec_.id;
    e.attempt = attempt_;
    e.ranks = d.alive;
    e.text = joined(d.plans, "; ", describe);
    if (d.revoked) e.text += " revoked";
    if (d.frames_only) e.text += " nothing is read any more (to look into another rank's memory was refused)";
    if (d.no_windows) e.text += " nothing goes by windows any more (there was no room for one)";
    core_.event(std::move(e));
    for (const auto& p : d.plans)
        if (p.settled) std::erase_if(proposals_, [&](const Proposal& x) { return x.seq == p.seq; });
    std::erase_if(proposals_, [&](const Proposal& x) {
        if (x.code == kUnreadable || x.code == kNoWindow) return true;  // of the attempt before
        const auto* plan = x.code == Code::Mismatch ? d.plan_for(x.seq) : nullptr;
        return plan != nullptr && plan->verdict == OpPlan::Verdict::Repair;  // all do it in the same way from here on
    });
    if (replays()) {
        lost_logs_->learn(d.log_since);
        failures_->learn(d);  // before anything is served
        learn_complete(d);
    }
    apply_plans();
    if (d.revoked) {
        auto s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
        s.epoch = d.epoch;
        fail_messages(s);
        std::erase_if(proposals_, [](const Proposal& p) { return p.seq == 0; });
    }
    if (agreed) agreeing_->finish();
    // Not a step in an attempt that has lost a member already: what this rank would run (C8) asks things of all members.
    if (!(decision_.alive - in_view()).empty()) look_again();
    pump();
    look_again();
}

void Communicator::apply_plans() {
    if (!open_.empty()) open_.front()->started = false;
    if (replays()) serve_logged();  // what was being done again and turns out to be complete: this process has not all of it
    for (const auto& p : decision_.plans) {
        core_.host.trace(p.verdict == OpPlan::Verdict::Complete ? "plan.complete"
                         : p.verdict == OpPlan::Verdict::Fail   ? "plan.fail"
                                                                : "plan.repair");
        for (const auto& r : p.runs) {
            core_.host.trace(r.mode == SegmentMode::None     ? "plan.keep"
                             : r.mode == SegmentMode::Reduce ? "plan.reduce"
                                                             : "plan.hand_out");
        }
        if (p.verdict == OpPlan::Verdict::Complete && !open_.empty() && open_.front()->seq == p.seq) {
            FT_CHECK(!open_.front()->shape.shares_finals() || open_.front()->all_final(),
                     "operation %llu is complete elsewhere but not here", static_cast<unsigned long long>(p.seq));
            // One without data is all final from the start, and may not have come to its fence here. (If it cannot be logged, the next
            // operation says so: this one is complete elsewhere.)
            if (replays() && p.seq > logged_) log_result(*open_.front());
            finish_current({});
            if (!open_.empty()) open_.front()->started = false;
        } else if (p.verdict == OpPlan::Verdict::Repair && p.seq == last_.seq && p.seq <= std::max(done_seq_, served_) &&
                   retains_result()) {
            core_.host.trace("hand_out.kept");
            if (last_.flat != nullptr) keep_apart();
            else if (last_.kept == nullptr) keep_in_log();
            helpers_.push_back(last_.hand_out(rank_, calls_.signature_of(last_.shape)));
        }
    }
}

}  // namespace ftcomm
