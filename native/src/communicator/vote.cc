// Freeze, vote, decide, record, apply: how a communicator leaves an attempt. The leader is the lowest voter by one's own view;
// safety does not depend on who that is, only on the compare-and-set of the communicator's head cell (M1, M2, M4).
#include <algorithm>
#include <cstdio>

#include "base/check.h"
#include "base/failpoint.h"
#include "communicator/communicator.h"

namespace ftcomm {

std::string Communicator::cell_key() const {
    char id[24];
    std::snprintf(id, sizeof id, "%016llx", static_cast<unsigned long long>(spec_.id));
    return core_.config.job + "/comm/" + id;
}

RankSet Communicator::in_view() const {
    RankSet out;
    for (std::size_t r = 0; r < spec_.members.size(); ++r)
        if (core_.in_view(spec_.members[r], incarnations_[r])) out.add(static_cast<int>(r));
    return out;
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
void Communicator::freeze() {
    if (frozen_) return;
    frozen_ = true;
    FT_POINT("vote.freeze");
    core_.host.trace("freeze");
    if (core_.rules.c1) {
        run_.reset();
        core_.sender.drop_collectives(spec_.id);
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
    v.done_seq = done_seq_;
    v.view_epoch = core_.view.epoch;
    if (last_.seq > 0) {
        OpVote o;
        o.seq = last_.seq;
        o.state = last_.state;
        o.retained = last_.kept != nullptr;
        o.shape = last_.shape;
        o.labels = last_.labels;
        v.ops.push_back(std::move(o));
    }
    if (!open_.empty() && open_.front()->started) {
        const auto& op = *open_.front();
        OpVote o;
        o.seq = op.seq;
        o.shape = op.shape;
        o.labels = op.label_runs();
        if (!core_.rules.c4 && op.shape.kind == OpKind::AllReduce && o.labels.size() > 1) {
            // Rule C4 switched off: one label for all that the operation holds.
            for (const auto& l : o.labels)
                if (l.kind == LabelKind::Final) {
                    o.labels = {{op.grid.segments(), LabelKind::Final, l.contributors}};
                    break;
                }
        }
        v.ops.push_back(std::move(o));
    }
    v.proposals = proposals_;
    return v;
}

void Communicator::send_vote() {
    if (!frozen_ || !core_.dead_end()) return;
    const auto vote = build_vote();
    votes_[rank_] = vote;
    const int to = leader();
    core_.host.trace("vote");
    if (to == rank_) {
        try_decide();
        return;
    }
    if (to < 0) return;
    ByteWriter w;
    vote.encode(w);
    FT_POINT("vote.send");
    core_.sender.send_long(spec_.members[static_cast<std::size_t>(to)], control(FrameKind::Vote), spec_and(w.take()));
}

void Communicator::on_vote(int rank, Vote vote) {
    if (vote.attempt <= attempt_) {
        // It has missed the decision (its leader died before announcing it): the record settles it.
        if (!record_.empty()) {
            auto h = control(FrameKind::Decision);
            h.attempt = attempt_;
            core_.sender.send_long(spec_.members[static_cast<std::size_t>(rank)], h, record_);
        }
        return;
    }
    const bool ahead = vote.attempt > attempt_ + 1;
    votes_[rank] = std::move(vote);
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
    if (attempt > attempt_ + 1) {
        read_cell();
        return;
    }
    freeze();
    send_vote();
}

void Communicator::try_decide() {
    if (!frozen_ || cas_busy_ || leader() != rank_ || !core_.dead_end()) return;
    const auto want = voters();
    std::map<int, Vote> votes;
    for (int r : want.list()) {
        const auto it = votes_.find(r);
        if (it != votes_.end() && it->second.attempt == attempt_ + 1) votes.emplace(r, it->second);
    }
    if (votes.size() < static_cast<std::size_t>(want.count())) {
        if (!freeze_sent_) {
            freeze_sent_ = true;
            ByteWriter none;
            const auto payload = spec_and(none.take());
            for (int r : want.list())
                if (r != rank_ && votes.count(r) == 0)
                    core_.sender.send_long(spec_.members[static_cast<std::size_t>(r)], control(FrameKind::Freeze), payload);
        }
        return;
    }
    FT_POINT("vote.plan");
    PlanInput in{spec_, decision_, votes, failed(), evidence(), core_.view.epoch, core_.rules};
    auto d = make_decision(in);
    d.nonce = core_.random();
    auto bytes = d.encode();
    cas_busy_ = true;
    core_.host.trace("decide");
    FT_POINT("decide.before");
    core_.cells.compare_and_set(cell_key(), record_, bytes, [this, bytes](CellClient::Result result, const Bytes& value) {
        on_decide_reply(result, value, bytes);
        try_agree();  // votes for either may have come in while the cell was busy
        try_decide();
    });
    if (!core_.rules.m4) {  // rule M4 switched off: act before it is recorded
        announce(bytes, FrameKind::Decision);
        adopt(bytes);
    }
}

void Communicator::on_decide_reply(CellClient::Result result, const Bytes& value, const Bytes& mine) {
    cas_busy_ = false;
    if (result == CellClient::Result::Conflict && !core_.rules.m1) result = CellClient::Result::Swapped;
    if (result == CellClient::Result::Lost) {
        core_.authority_lost = true;
        return;  // the node fails everything after this input
    }
    if (result == CellClient::Result::Swapped) {
        FT_POINT("decide.after");
        announce(mine, FrameKind::Decision);
        adopt(mine);
        return;
    }
    core_.host.trace("decide.conflict");
    const auto current = Decision::decode(value);
    FT_CHECK(current.has_value(), "the head cell of communicator %s does not hold a decision", spec_.name.c_str());
    if (current->attempt > attempt_ && core_.rules.m2) {
        announce(value, FrameKind::Decision);  // its leader may have died before it could
        adopt(value);
        return;
    }
    // Only an agree (or, for a replacement, older attempts) came between: carry it forward and try again.
    record_ = value;
    decision_.agree_seq = current->agree_seq;
    decision_.agree_value = current->agree_value;
    decision_.agree_cause = current->agree_cause;
    decision_.agree_survivors = current->agree_survivors;
    finish_agree();
    try_decide();
}

void Communicator::announce(const Bytes& record, FrameKind kind) {
    for (int r : in_view().list()) {
        if (r == rank_) continue;
        auto h = control(kind);
        core_.sender.send_long(spec_.members[static_cast<std::size_t>(r)], h, record);
        if (kind == FrameKind::Decision) FT_POINT("decide.announce");
    }
}

void Communicator::read_cell() {
    if (cell_reading_) return;
    cell_reading_ = true;
    core_.cells.read(cell_key(), [this](CellClient::Result result, const Bytes& value) {
        cell_reading_ = false;
        if (result == CellClient::Result::Lost) {
            core_.authority_lost = true;
            return;
        }
        if (!value.empty()) adopt(value);
    });
}

// A record from the cell, whoever brought it. Records are ordered by (attempt, agree number); older ones change nothing.
void Communicator::adopt(const Bytes& record) {
    auto d = Decision::decode(record);
    FT_CHECK(d.has_value(), "an undecodable decision for communicator %s", spec_.name.c_str());
    if (d->attempt > attempt_) {
        if (!d->alive.has(rank_)) return;  // this rank is out of the job; the view says so
        FT_CHECK(d->attempt == attempt_ + 1 || !core_.rules.m4, "attempt %u decided without this rank, which is at %u",
                 d->attempt, attempt_);
        record_ = record;
        apply(*d);
        return;
    }
    if (d->agree_seq > decision_.agree_seq) {
        decision_.agree_seq = d->agree_seq;
        decision_.agree_value = d->agree_value;
        decision_.agree_cause = d->agree_cause;
        decision_.agree_survivors = d->agree_survivors;
        record_ = record;
        finish_agree();
    }
}

void Communicator::apply(const Decision& d) {
    FT_POINT("decide.apply");
    core_.host.trace("apply");
    freeze();  // a decision may arrive before the news that made it: this rank's vote was in it all the same
    const bool agreed = d.agree_seq > decision_.agree_seq;
    attempt_ = d.attempt;
    decision_ = d;
    frozen_ = false;
    freeze_sent_ = false;
    run_.reset();
    helpers_.clear();
    std::erase_if(votes_, [&](const auto& v) { return v.second.attempt <= attempt_; });
    std::erase_if(stash_, [&](const Stashed& f) { return f.header.attempt < attempt_; });
    NodeEvent e;
    e.kind = NodeEvent::Kind::Decided;
    e.comm = spec_.id;
    e.attempt = attempt_;
    e.ranks = d.alive;
    for (const auto& p : d.plans) e.text += (e.text.empty() ? "" : "; ") + describe(p);
    if (d.revoked) e.text += " revoked";
    core_.event(std::move(e));
    for (const auto& p : d.plans)
        if (p.settled) std::erase_if(proposals_, [&](const Proposal& x) { return x.seq == p.seq; });
    apply_plans();
    if (d.revoked) {
        auto s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
        s.epoch = d.epoch;
        p2p_.fail_all(s);
        std::erase_if(proposals_, [](const Proposal& p) { return p.seq == 0; });
    }
    if (agreed) finish_agree();
    pump();
    // News since the votes were cast: another death, a proposal that came too late for them.
    if (!(decision_.alive - in_view()).empty() || wishes_now()) {
        freeze();
        send_vote();
    } else {
        // Peers may have voted for the next attempt already.
        for (const auto& [rank, vote] : votes_) {
            if (vote.attempt != attempt_ + 1) continue;
            freeze();
            send_vote();
            break;
        }
    }
}

void Communicator::apply_plans() {
    if (!open_.empty()) open_.front()->started = false;
    for (const auto& p : decision_.plans) {
        core_.host.trace(p.verdict == OpPlan::Verdict::Complete ? "plan.complete"
                         : p.verdict == OpPlan::Verdict::Fail   ? "plan.fail"
                                                                : "plan.repair");
        for (const auto& r : p.runs) {
            core_.host.trace(r.mode == SegmentMode::None     ? "plan.keep"
                             : r.mode == SegmentMode::Reduce ? "plan.reduce"
                             : r.mode == SegmentMode::Gather ? "plan.hand_out"
                                                             : "plan.absent");
        }
        if (p.verdict == OpPlan::Verdict::Complete && !open_.empty() && open_.front()->seq == p.seq) {
            const auto kind = open_.front()->shape.kind;
            FT_CHECK(kind == OpKind::Reduce || kind == OpKind::ReduceScatter || open_.front()->all_final(),
                     "operation %llu is complete elsewhere but not here", static_cast<unsigned long long>(p.seq));
            finish_current({});
            if (!open_.empty()) open_.front()->started = false;
        } else if (p.verdict == OpPlan::Verdict::Repair && p.seq == last_.seq && p.seq <= done_seq_ && last_.kept != nullptr) {
            core_.host.trace("hand_out.kept");
            auto helper = std::make_unique<OpState>(p.seq, last_.desc, last_.shape, last_.grid, rank_, core_.rules.c8, nullptr);
            helper->kept = last_.kept;
            std::uint32_t s = 0;
            for (const auto& l : last_.labels)
                for (std::uint32_t i = 0; i < l.count; ++i, ++s)
                    if (l.kind == LabelKind::Final) helper->set_final(s, l.contributors);
            helpers_.push_back(std::move(helper));
        }
    }
}

void Communicator::on_view() {
    if (core_.solo) return;  // not a member yet: nothing to vote on
    p2p_.on_failures(failed(), acked_, evidence());
    freeze_sent_ = false;
    if (!(decision_.alive - in_view()).empty()) freeze();
    if (frozen_) send_vote();
    if (agree_.active) send_agree_vote();
    try_agree();
}

// M13: the newcomers know nothing of what was before; everyone goes on from the same attempt and operation number.
void Communicator::on_admitted(const AdmitEntry* entry, const RankSet& slots, const RankSet& alive) {
    RankSet came;
    for (std::size_t r = 0; r < spec_.members.size(); ++r) {
        if (!slots.has(spec_.members[r])) continue;
        incarnations_[r] = core_.view.members[static_cast<std::size_t>(spec_.members[r])].incarnation;
        came.add(static_cast<int>(r));
        if (spec_.members[r] != core_.self()) p2p_.forget(static_cast<int>(r));
    }
    if (came.empty()) return;
    FT_CHECK(open_.empty() || !open_.front()->started, "a replacement came in while %s was running",
             name_of(*open_.front()).c_str());
    frozen_ = false;
    freeze_sent_ = false;
    if (entry != nullptr && core_.rules.m13) {
        attempt_ = entry->attempt;
        done_seq_ = entry->next_seq - 1;
        next_seq_ = entry->next_seq + open_.size();  // what other threads posted meanwhile waits in line
        decision_.agree_seq = std::max(decision_.agree_seq, entry->agree_seq);
        decision_.revoked |= entry->revoked;
        decision_.revoked_from = decision_.revoked ? entry->next_seq : ~std::uint64_t{0};
    }
    decision_.attempt = attempt_;
    decision_.alive = {};  // as recorded, not as this rank sees it now: later deaths are the next decision's business
    for (std::size_t r = 0; r < spec_.members.size(); ++r)
        if (alive.has(spec_.members[r])) decision_.alive.add(static_cast<int>(r));
    decision_.plans.clear();
    decision_.fail_from = ~std::uint64_t{0};
    decision_.cause = {};
    last_ = {};
    shared_seq_ = done_seq_;
    helpers_.clear();
    acked_ = acked_ - came;
    std::erase_if(votes_, [&](const auto& v) { return v.second.attempt <= attempt_; });
    std::erase_if(stash_, [&](const Stashed& f) { return f.header.attempt < attempt_; });
    p2p_.on_failures(failed(), acked_, evidence());
}

void Communicator::on_frame(int slot, const FrameHeader& h, ByteView payload) {
    const int from = rank_of_slot(slot);
    if (from < 0 || !core_.in_view(slot, incarnations_[static_cast<std::size_t>(from)])) return;
    if (is_collective(h.kind)) {
        on_collective(from, h, payload);
        return;
    }
    if (is_p2p(h.kind)) {
        if (!decision_.revoked) p2p_.on_frame(from, h, payload);
        return;
    }
    switch (h.kind) {
        case FrameKind::Vote: {
            ByteReader r(payload);
            decode_spec(r);
            ByteReader body(r.bytes());
            auto vote = Vote::decode(body);
            FT_CHECK(r.ok() && vote.has_value(), "an undecodable vote from rank %d", from);
            on_vote(from, std::move(*vote));
            return;
        }
        case FrameKind::Freeze: on_freeze(h.attempt); return;
        case FrameKind::Decision:
        case FrameKind::AgreeResult: adopt(Bytes(payload.begin(), payload.end())); return;
        case FrameKind::AgreeVote: {
            ByteReader r(payload);
            decode_spec(r);
            ByteReader body(r.bytes());
            AgreeVote v;
            v.seq = body.get<std::uint64_t>();
            v.kind = body.get<AgreeKind>();
            v.flag = body.get<std::int64_t>();
            v.acked = body.ranks();
            FT_CHECK(r.ok() && body.ok(), "an undecodable agree vote from rank %d", from);
            on_agree_vote(from, v);
            return;
        }
        default: return;
    }
}

}  // namespace ftcomm
