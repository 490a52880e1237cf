// Freeze and vote: how a communicator leaves an attempt; what follows is in decide.cc. The leader is the lowest voter by one's own view;
// safety does not depend on who that is, only on the compare-and-set of the communicator's head cell (M1, M2, M4).
#include <algorithm>
#include <cstdio>

#include "base/check.h"
#include "base/failpoint.h"
#include "channel/spread.h"
#include "communicator/agree.h"
#include "communicator/announce.h"
#include "communicator/checkpoints.h"
#include "communicator/lost_logs.h"
#include "communicator/restore.h"
#include "communicator/vote_tree.h"

namespace ftcomm {

std::string Communicator::cell_key() const {
    char id[24];
    // Of the members, too: ranks that give one number to communicators that have nobody in common never hear of each other.
    std::snprintf(id, sizeof id, "%016llx", static_cast<unsigned long long>(spec_.id ^ calls_.members_hash()));
    return core_.config.job + "/comm/" + id;
}

const RankSet& Communicator::in_view() const {
    if (in_view_epoch_ == core_.view.epoch) return in_view_;
    in_view_ = {};
    for (std::size_t r = 0; r < spec_.members.size(); ++r)
        if (core_.in_view(spec_.members[r], incarnations_[r])) in_view_.add(static_cast<int>(r));
    in_view_epoch_ = core_.view.epoch;
    return in_view_;
}

std::map<int, Evidence> Communicator::evidence() const {
    std::map<int, Evidence> out;
    for (std::size_t r = 0; r < spec_.members.size(); ++r) {
        const auto& m = core_.view.members[static_cast<std::size_t>(spec_.members[r])];
        if (!m.alive || m.incarnation != incarnations_[r]) out[static_cast<int>(r)] = m.evidence;
        if (core_.left.has(spec_.members[r])) out[static_cast<int>(r)] = Evidence::Left;
    }
    return out;
}

FrameHeader Communicator::control(FrameKind kind) const {
    FrameHeader h;
    h.kind = kind;
    h.comm = spec_.id;
    h.attempt = attempt_ + 1;
    return h;
}

// Votes carry the communicator's description: a rank that has not made it yet can take part all the same.
Bytes Communicator::spec_and(const Bytes& rest) const {
    ByteWriter w;
    encode_spec(w, spec_);
    w.bytes(rest);
    return w.take();
}

void Communicator::propose(Code code, std::uint64_t seq) {
    for (const auto& p : proposals_)
        if (p.seq == seq && p.code == code) return;
    if (!core_.rules.c7 && seq != 0) {  // rule C7 switched off: a private opinion
        auto* op = current();
        if (op != nullptr && op->seq == seq && op->request != nullptr) {
            finish_current(Status::error(code, "given up privately"));
            pump();
            return;
        }
    }
    proposals_.push_back({code, seq});
    core_.host.trace("propose");
    if (!wishes_now()) return;  // pump() looks again when the operation's turn has come
    freeze();
    send_vote();
}

bool Communicator::wishes_now() const {
    const bool started = !open_.empty() && open_.front()->started;
    for (const auto& p : proposals_)
        if (p.seq == 0 || (started && p.seq <= open_.front()->seq)) return true;
    return false;
}

void Communicator::revoke() {
    if (!decision_.revoked) propose(Code::Revoked, 0);
}

// C1: from here on this rank is deaf to the attempt, so that what it votes stays true.
void Communicator::freeze(bool before_vote) {
    if (frozen_ || disputed()) return;
    frozen_ = true;
    vote_tree_->on_freeze();
    patience_ = std::max(patience_, core_.now + timeout());
    FT_POINT("vote.freeze");
    core_.host.trace("freeze");
    if (core_.rules.c1) {
        if (settle_run() && before_vote) finish_current({});
        drop_run();
    }
    NodeEvent e;
    e.kind = NodeEvent::Kind::Frozen;
    e.comm = spec_.id;
    e.attempt = attempt_ + 1;
    core_.event(std::move(e));
}

Vote Communicator::build_vote() const {
    Vote v;
    v.attempt = attempt_ + 1;
    v.done_seq = std::max(done_seq_, served_);
    v.logged = replays() ? logged_whole() : 0;
    v.known_done = decision_.done_through;
    v.view_epoch = core_.view.epoch;
    v.inherited = inherited_;
    if (replays()) {
        v.revoked_from = decision_.revoked_from;
        if (lost_logs_->any()) v.log_since = lost_logs_->since();
        v.failures = failures_->list();
    }
    if (last_.seq > 0) {
        OpVote o;
        o.seq = last_.seq;
        o.state = last_.state;
        o.retained = retains_result();
        o.shape = last_.shape;
        o.labels = last_.labels;
        v.ops.push_back(std::move(o));
    }
    if (!open_.empty() && open_.front()->entered) {  // also one that waits for a hand-out of the operation before it
        const auto& op = *open_.front();
        OpVote o;
        o.seq = op.seq;
        o.shape = op.shape;
        o.labels = op.label_runs();
        if (!core_.rules.c4 && op.shape.runs_as() == OpKind::AllReduce && o.labels.size() > 1) {
            // Rule C4 switched off: one label for all that the operation holds.
            for (const auto& l : o.labels)
                if (l.kind == LabelKind::Final) {
                    o.labels = {{op.grid.segments(), LabelKind::Final, l.contributors}};
                    break;
                }
        }
        v.ops.push_back(std::move(o));
    }
    v.unrun = unrun_;
    v.proposals = proposals_;
    return v;
}

void Communicator::send_vote(bool calls) {
    if (!frozen_ || !dead_end() || (replays() && (!present() || restore_ != nullptr))) return;
    const auto vote = build_vote();
    ballot_.take(rank_, vote);
    const int to = leader();
    core_.host.trace("vote");
    if (to == rank_) {
        try_decide();
        return;
    }
    if (to < 0) return;
    const bool tree = vote_tree_->is_used();
    if (!tree || calls || !vote.proposals.empty()) send_vote_straight(to, vote);
    if (tree) vote_tree_->send_on();
}

void Communicator::send_vote_straight(int to, const Vote& vote) {
    ByteWriter w;
    vote.encode(w);
    FT_POINT("vote.send");
    core_.sender.send_long(slot_of(to), control(FrameKind::Vote), spec_and(w.take()));
}

void Communicator::on_vote(int rank, Vote vote) {
    if (vote.attempt <= attempt_) {
        // It has missed the decision (its leader died before announcing it): the record settles it.
        announcements_->answer(rank, FrameKind::Decision);
        return;
    }
    const bool ahead = vote.attempt > attempt_ + 1;
    ballot_.take(rank, std::move(vote));
    if (ahead) {
        core_.host.trace("vote.ahead");
        read_cell();
        return;
    }
    if (!frozen_) {
        freeze();
        send_vote();
    }
    if (leader() == rank_) try_decide();
}

void Communicator::on_freeze(std::uint32_t attempt) {
    if (attempt <= attempt_) return;
    asked_ = std::max(asked_, attempt);
    if (attempt > attempt_ + 1) {
        read_cell();
        return;
    }
    freeze();
    send_vote();
}

// After a decision or an admission: is there ground for the next decision already? A death, a wish that came too late for the votes,
// or a peer that was here first and waits for this rank's vote.
void Communicator::look_again() {
    if (frozen_ || core_.solo || !dead_end()) return;
    bool ground =
        !(decision_.alive - in_view()).empty() || wishes_now() || asked_ > attempt_ || !ballot_.voters(attempt_ + 1).empty();
    // What failed at once here, in the attempt before, and others run in this one: their frames came before the decision did.
    const bool differs = std::any_of(stash_.begin(), stash_.end(),
                                     [&](const Stashed& f) { return f.header.attempt == attempt_ && unrun_.has(f.header.seq); });
    if (differs) core_.host.trace("mismatch.late");
    if (!ground && !differs) return;
    freeze();
    send_vote(differs);
}

void Communicator::on_view() {
    excluded_ = false;
    failed_in_order();
    announcements_->on_view();
    if (core_.solo) return;  // not a member yet: nothing to vote on
    if (replays()) {
        on_view_replay();
        return;
    }
    p2p_.on_failures(failed(), acked_, evidence());
    freeze_sent_ = false;
    if (!(decision_.alive - in_view()).empty()) freeze();
    if (frozen_) send_vote();
    agreeing_->on_view();
}

namespace {

// Of a frame that describes its communicator (spec_and).
ByteView behind_spec(ByteView payload, const char* what, int from) {
    ByteReader r(payload);
    decode_spec(r);
    const auto body = r.bytes();
    FT_CHECK(r.ok(), "undecodable %s from rank %d", what, from);
    return body;
}

}  // namespace

std::byte* Communicator::place(int slot, const FrameHeader& h) {
    const int from = rank_of_slot(slot);
    if (from < 0 || disputed() || !core_.in_view(slot, incarnations_[static_cast<std::size_t>(from)]) || decision_.revoked ||
        !replays() || restore_ != nullptr || h.segment != static_cast<std::uint32_t>(LoggedPairs::Channel::Messages))
        return nullptr;
    return pairs_->place(from, h);
}

void Communicator::on_frame(int slot, const FrameHeader& h, ByteView payload) {
    if (is_disputed_by(slot, h, payload)) return;
    const int from = rank_of_slot(slot);
    if (!core_.in_view(slot, incarnations_[static_cast<std::size_t>(from)])) return;
    if (is_collective(h.kind)) {
        on_collective(from, h, payload);
        return;
    }
    if (is_p2p(h.kind)) {
        if (decision_.revoked) return;
        if (h.kind == FrameKind::GroupResume) {
            if (replays()) checkpoints_->on_offer(from, h.seq);
            return;
        }
        if (closed_ && !replays() && h.kind != FrameKind::Cts) return;  // nobody will receive it
        if (!replays() || h.kind <= FrameKind::Data) {  // under replay: inside a log group
            p2p_.on_frame(from, h, payload);
            return;
        }
        if (restore_ != nullptr) {
            restore_->keep(from, h, payload);
            return;
        }
        if (h.segment == static_cast<std::uint32_t>(LoggedPairs::Channel::Messages)) {
            pairs_->on_frame(from, h, payload);
        } else {
            ring().pairs().on_frame(from, h, payload);
            ring().pump();
        }
        return;
    }
    if (is_spread(h.kind)) {
        Spread told;
        FT_CHECK(Spread::decode(payload, &told), "an undecodable record from rank %d", from);
        announcements_->pass_on(h, told.rest, told.record);
        if (h.kind == FrameKind::Freeze) on_freeze(h.attempt);
        else adopt(Bytes(told.record.begin(), told.record.end()));
        return;
    }
    switch (h.kind) {
        case FrameKind::Vote: {
            ByteReader body(behind_spec(payload, "vote", from));
            auto vote = Vote::decode(body);
            FT_CHECK(vote.has_value(), "an undecodable vote from rank %d", from);
            on_vote(from, std::move(*vote));
            return;
        }
        case FrameKind::Votes: vote_tree_->on_votes(from, h.aux, behind_spec(payload, "votes", from)); return;
        case FrameKind::AgreeVote: agreeing_->on_votes(from, h.aux, behind_spec(payload, "agree votes", from)); return;
        case FrameKind::RestoreAsk:
            if (replays()) lost_logs_->on_ask(from, behind_spec(payload, "question about a lost log", from));
            return;
        case FrameKind::RestoreReply: {
            ByteReader r(payload);
            RestoreAsk::decode(r);
            if (restore_ != nullptr) restore_->on_reply(from, payload);
            else if (replays() && RestoreState::decode(r).older) lost_logs_->on_older();
            return;
        }
        default: return;
    }
}

// M10: it was heard in time, so it stays readable, as it would be had this communicator been there.
void Communicator::on_last_words(int slot, std::uint32_t incarnation, const FrameHeader& h, ByteView payload) {
    const int from = rank_of_slot(slot);
    if (from >= 0 && !replays() && incarnations_[static_cast<std::size_t>(from)] == incarnation) p2p_.on_frame(from, h, payload);
}

// Of a message in pieces the last ones may be missing.
void Communicator::after_last_words() {
    if (!replays()) p2p_.on_failures(failed(), acked_, evidence());
}

}  // namespace ftcomm
