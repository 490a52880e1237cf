// Coming in and going out on purpose. Join: replacements wait; at a join point all living ranks vote with the standing of their
// communicators, the lowest compares-and-sets a view with the newcomers and that table (M13). Leave: a rank goes when everyone has
// finished what it has finished (M10).
#include <algorithm>

#include "base/check.h"
#include "base/failpoint.h"
#include "communicator/node_impl.h"

namespace ftcomm {

RequestPtr NodeImpl::join_wait() {
    auto request = std::make_shared<Request>();
    if (auto s = core.dead_end(); !s) {
        core.finish(request, std::move(s));
    } else if (!core.solo) {
        request->survivors = core.view.alive();
        core.finish(request, {});
    } else {
        join_request_ = request;
        send_join_requests();
    }
    return request;
}

void NodeImpl::send_join_requests() {
    // Again each heartbeat: whoever had heard it may have died since.
    next_join_request_ = core.now + core.config.heartbeat;
    FrameHeader h;
    h.kind = FrameKind::JoinRequest;
    FT_POINT("join.request");
    for (int s : core.view.alive().list())
        if (s != core.self()) core.sender.send(s, h);
    read_view(true);
}

// Every member of the view is known to be dead, or its link was reset and has been silent ever since, or it has just been silent
// for far longer than members give each other. Only this rank ends then: nothing rests on its being right.
bool NodeImpl::nobody_left_to_join() const {
    if (join_request_ == nullptr || !core.solo || !core.dead_end()) return false;
    for (int s : core.view.alive().list()) {
        if (s == core.self() || confirmed_.count(s) > 0) continue;
        const auto silence = core.now - heard_[static_cast<std::size_t>(s)];
        if (silence <= (reset_.count(s) > 0 ? 3 : 10) * core.config.heartbeat) return false;
    }
    return true;
}

void NodeImpl::give_up_joining() {
    core.host.trace("join.hopeless");
    auto s = Status::error(Code::PeerFailure,
                           "every member of the job is gone or silent: nobody is left who could let this replacement in. "
                           "Start the job again, from a checkpoint");
    for (int slot : core.view.alive().list()) {
        if (slot == core.self()) continue;
        const auto it = confirmed_.find(slot);
        s.ranks.push_back(slot);
        s.evidence.push_back(it != confirmed_.end()   ? it->second
                             : reset_.count(slot) > 0 ? Evidence::Reset
                                                      : Evidence::Heartbeat);
    }
    s.operation = "join";
    s.epoch = core.view.epoch;
    auto request = std::move(join_request_);
    join_request_ = nullptr;
    if (core.config.log != nullptr) core.abandoned = s;
    core.finish(request, std::move(s));
}

void NodeImpl::on_join_request(int slot, std::uint32_t incarnation) {
    const auto& m = core.view.members[static_cast<std::size_t>(slot)];
    if (incarnation < m.incarnation || (incarnation == m.incarnation && m.alive)) return;
    if (const auto it = dead_early_.find(slot); it != dead_early_.end() && it->second.incarnation >= incarnation) return;
    auto& known = waiting[slot];
    if (known >= incarnation && known != 0) return;
    known = incarnation;
    core.host.trace("join.request");
    if (m.alive) {
        on_evidence(slot, m.incarnation, Evidence::Reborn);
    } else {
        core.transport.attach(slot, incarnation);
    }
    NodeEvent e;
    e.kind = NodeEvent::Kind::JoinWaiting;
    e.slot = slot;
    e.incarnation = incarnation;
    core.event(std::move(e));
    if (admit_request_ != nullptr && admit_voted_) send_admit_vote();
}

RequestPtr NodeImpl::admit() {
    auto request = std::make_shared<Request>();
    if (auto s = core.dead_end(); !s) {
        core.finish(request, std::move(s));
    } else if (admit_request_ != nullptr || core.solo) {
        core.finish(request, Status::error(Code::Invalid, core.solo ? "a replacement waits with join_wait"
                                                                    : "an admission is already under way"));
    } else {
        admit_request_ = request;
        admit_voted_ = false;
        core.admitting = true;
        for (auto& [id, comm] : comms) comm->hold();
    }
    return request;  // settle() votes as soon as the communicators are at rest
}

void NodeImpl::send_admit_vote() {
    AdmitVote v;
    v.admissions = core.view.admissions;
    v.waiting = waiting;
    for (const auto& [id, comm] : comms) v.table.push_back(comm->standing());
    admit_voted_ = true;
    core.host.trace("admit.vote");
    const int leader = core.view.alive().lowest();
    if (leader == core.self()) {
        admit_votes_[leader] = std::move(v);
        try_admit();
        return;
    }
    ByteWriter w;
    w.put(v.admissions).put(static_cast<std::uint32_t>(v.waiting.size()));
    for (const auto& [slot, incarnation] : v.waiting) w.put(static_cast<std::int32_t>(slot)).put(incarnation);
    w.put(static_cast<std::uint32_t>(v.table.size()));
    for (const auto& a : v.table)
        w.put(a.comm).put(a.attempt).put(a.next_seq).put(a.agree_seq).put(static_cast<std::uint8_t>(a.revoked));
    FrameHeader h;
    h.kind = FrameKind::AdmitVote;
    FT_POINT("join.admit");
    core.sender.send_long(leader, h, w.take());
}

void NodeImpl::on_admit_vote(int slot, ByteView payload) {
    ByteReader r(payload);
    AdmitVote v;
    v.admissions = r.get<std::uint64_t>();
    for (auto n = r.count(8); n > 0; --n) {
        const auto s = r.get<std::int32_t>();
        v.waiting[s] = r.get<std::uint32_t>();
    }
    v.table.resize(r.count(29));
    for (auto& a : v.table) {
        a.comm = r.get<std::uint64_t>();
        a.attempt = r.get<std::uint32_t>();
        a.next_seq = r.get<std::uint64_t>();
        a.agree_seq = r.get<std::uint64_t>();
        a.revoked = r.get<std::uint8_t>() != 0;
    }
    FT_CHECK(r.done(), "an undecodable admit vote from slot %d", slot);
    admit_votes_[slot] = std::move(v);
    try_admit();
}

void NodeImpl::try_admit() {
    const auto living = core.view.alive();
    if (view_busy_ || !admit_voted_ || admit_request_ == nullptr || living.lowest() != core.self() || !core.dead_end()) return;
    std::map<int, std::uint32_t> newcomers;
    std::map<CommId, AdmitEntry> table;
    for (int s : living.list()) {
        const auto it = admit_votes_.find(s);
        if (it == admit_votes_.end() || it->second.admissions != core.view.admissions) return;
        for (const auto& [slot, incarnation] : it->second.waiting) newcomers[slot] = std::max(newcomers[slot], incarnation);
        for (const auto& a : it->second.table) {
            auto& e = table[a.comm];
            e.comm = a.comm;
            e.attempt = std::max(e.attempt, a.attempt + 1);
            e.next_seq = std::max(e.next_seq, a.next_seq);
            e.agree_seq = std::max(e.agree_seq, a.agree_seq);
            e.revoked |= a.revoked;
        }
    }
    JobView next = core.view;
    next.epoch += 1;
    next.parent = core.view.nonce;
    next.nonce = core.random();
    next.admissions += 1;
    // Above all that was voted or sent before: also in an attempt that was being decided meanwhile.
    for (auto& [id, e] : table) e.attempt = std::max(e.attempt, first_attempt(next.admissions));
    next.admitted = {};
    next.admit.clear();
    for (const auto& [slot, incarnation] : newcomers) {
        auto& m = next.members[static_cast<std::size_t>(slot)];
        if (m.alive || m.incarnation >= incarnation) continue;
        if (const auto it = dead_early_.find(slot); it != dead_early_.end() && it->second.incarnation >= incarnation) continue;
        m = MemberState{incarnation, true, Evidence::None, next.admissions};
        next.admitted.add(slot);
    }
    for (const auto& [id, e] : table) next.admit.push_back(e);
    next.admit_alive = next.alive();
    core.host.trace("admit.decide");
    FT_POINT("join.before");
    compare_and_set_view(next);
}

// Replay: a replacement takes part again as soon as anybody has heard of it. It needs no join point: what it has to know is in its log, and
// where the communicators stand is voted on once it is in.
void NodeImpl::admit_returned() {
    if (view_busy_ || core.solo || (core.view.alive() - core.left).lowest() != core.self()) return;
    JobView next = core.view;
    next.admitted = {};
    next.admit.clear();
    for (const auto& [slot, incarnation] : waiting) {
        auto& m = next.members[static_cast<std::size_t>(slot)];
        if (m.alive || m.incarnation >= incarnation) continue;
        if (const auto it = dead_early_.find(slot); it != dead_early_.end() && it->second.incarnation >= incarnation) continue;
        m = MemberState{incarnation, true, Evidence::None, core.view.admissions + 1};
        next.admitted.add(slot);
    }
    if (next.admitted.empty()) return;
    next.epoch += 1;
    next.parent = core.view.nonce;
    next.nonce = core.random();
    next.admissions += 1;
    next.admit_alive = next.alive();
    core.host.trace("replay.admit");
    FT_POINT("join.before");
    compare_and_set_view(next);
}

// Replay: what was not possible without the dead, or without what their replacements still have to do again, is nobody's delay.
// But those who wait for one that is dead already do not begin anew with a further death: who gives up dies, too, and the others would wait
// for it as long again.
void NodeImpl::restart_timers(const JobView* before_deaths) {
    if (!replays()) return;
    for (auto& [id, comm] : comms)
        if (before_deaths == nullptr || comm->dead_in(*before_deaths).empty()) comm->restart_timers();
    if (leave_sent_ && !goodbye_sent_) leave_deadline_ = std::max(leave_deadline_, core.now + core.config.timeout);
}

// It may have more to do again than a timeout allows. To the whole job: who waits for it may do so through others.
void NodeImpl::tell_progress() {
    if (!replays() || core.solo || core.now < next_progress_) return;
    std::uint64_t done = 0;
    for (const auto& [id, comm] : comms) done += comm->replay_progress();
    if (done == told_progress_) return;
    told_progress_ = done;
    next_progress_ = core.now + core.config.heartbeat;
    FrameHeader h;
    h.kind = FrameKind::Replaying;
    for (int s : core.view.alive().list())
        if (s != core.self()) core.sender.send(s, h);
}

void NodeImpl::on_admission(const RankSet& came, bool self_came) {
    FT_POINT("join.after");
    core.host.trace("admission");
    core.admitting = false;
    // Votes for the next one may be here already: their senders heard of this one first.
    std::erase_if(admit_votes_, [&](const auto& v) { return v.second.admissions < core.view.admissions; });
    if (self_came) core.solo = false;
    // Not only those alive now: a newcomer may have died before this rank heard of the admission; its death comes next.
    RankSet newcomers = came | core.view.admitted;
    if (self_came) newcomers.add(core.self());
    for (int s : core.view.admitted.list()) {
        NodeEvent e;
        e.kind = NodeEvent::Kind::Joined;
        e.slot = s;
        e.incarnation = core.view.members[static_cast<std::size_t>(s)].incarnation;
        core.event(std::move(e));
    }
    admissions_.push_back({core.view.admissions, newcomers, core.view.admit_alive, core.view.admit});
    for (auto& [id, comm] : comms) {
        const AdmitEntry* entry = nullptr;
        for (const auto& a : core.view.admit)
            if (a.comm == id) entry = &a;
        comm->on_admitted(core.view.admissions, entry, newcomers, core.view.admit_alive);
    }
    if (self_came && join_request_ != nullptr) {
        join_request_->survivors = core.view.admit_alive;
        join_request_->outcome.contributors = core.view.admitted;
        auto request = std::move(join_request_);
        join_request_ = nullptr;
        core.finish(request, {});
    }
    if (leave_request_ != nullptr && replays() && !goodbye_sent_) {
        if (self_came && !leave_sent_) begin_leave();
        else if (leave_sent_) send_leave(newcomers & core.view.alive());  // what was said to their predecessors died with them
    }
    if (admit_request_ != nullptr) {
        admit_request_->survivors = core.view.admit_alive;
        admit_request_->outcome.contributors = core.view.admitted;
        auto request = std::move(admit_request_);
        admit_request_ = nullptr;
        core.finish(request, {});
    }
}

RequestPtr NodeImpl::leave() {
    auto request = std::make_shared<Request>();
    if (!core.dead_end() || (core.solo && !replays())) {
        core.finish(request, replays() ? core.dead_end() : Status{});
        return request;
    }
    leave_request_ = request;
    if (!core.solo) begin_leave();  // replay: else once it is in
    return request;
}

void NodeImpl::begin_leave() {
    (void)late.flush();  // nobody comes after this process who would do it again
    leave_deadline_ = core.now + (replays() ? core.config.timeout : leave_timeout());
    last_leave_deadline_ = core.now + 8 * leave_timeout();
    leave_sent_ = true;
    send_leave(core.view.alive() - core.left);
    check_leave_done();
}

void NodeImpl::send_leave(const RankSet& to) {
    ByteWriter w;
    w.put(static_cast<std::uint32_t>(comms.size()));
    for (const auto& [id, comm] : comms) w.put(id).put(comm->done_seq()).put(comm->agree_seq());
    const auto payload = w.take();
    FrameHeader h;
    h.kind = FrameKind::Leave;
    FT_POINT("leave.send");
    for (int s : to.list())
        if (s != core.self()) core.sender.send_long(s, h, payload);
}

bool NodeImpl::satisfied(const std::vector<LeaverAt>& leaver) const {
    // Replay: whoever still works may die and have to read again what the leaver has sent, which on another host only the leaver can
    // send. So nobody goes before all are at their end.
    if (replays() && !leave_sent_) return false;
    for (const auto& at : leaver) {
        const auto* comm = look_up(at.comm);
        if (comm != nullptr && !comm->disputed() && (comm->done_seq() < at.done || comm->agree_seq() < at.agreed)) return false;
    }
    return true;
}

void NodeImpl::on_leave(int slot, ByteView payload) {
    ByteReader r(payload);
    std::vector<LeaverAt> list(r.count(24));
    for (auto& at : list) {
        at.comm = r.get<CommId>();
        at.done = r.get<std::uint64_t>();
        at.agreed = r.get<std::uint64_t>();
    }
    FT_CHECK(r.done(), "an undecodable leave from slot %d", slot);
    leavers_[slot] = std::move(list);
    answer_leavers();
}

void NodeImpl::answer_leavers() {
    if (core.config.log != nullptr && !leave_sent_) return;
    for (auto it = leavers_.begin(); it != leavers_.end();) {
        if (!satisfied(it->second)) {
            ++it;
            continue;
        }
        FrameHeader h;
        h.kind = FrameKind::LeaveOk;
        core.sender.send(it->first, h);
        core.may_leave.add(it->first);
        it = leavers_.erase(it);
    }
}

void NodeImpl::on_leave_ok(int slot) {
    leave_ok_.add(slot);
    check_leave_done();
}

void NodeImpl::on_goodbye(int slot) {
    if (!core.rules.m10) return;
    look();  // before it left it may have shown what this rank waits for
    core.left.add(slot);
    ended_ = true;  // also where the view then takes it out for another reason, as with its log group
    core.host.trace("goodbye");
    for (auto& [id, comm] : all_awake()) comm->on_view();
    check_leave_done();
    propose_view();
}

// Replay: who is dead comes back, and needs those who are here. But once somebody has left, all had come to their end.
bool NodeImpl::nobody_missing() const {
    const auto has_left = [](const MemberState& m) { return !m.alive && m.evidence == Evidence::Left; };
    if (ended_ || !core.left.empty() || std::any_of(core.view.members.begin(), core.view.members.end(), has_left)) return true;
    return std::all_of(core.view.members.begin(), core.view.members.end(), [](const MemberState& m) { return m.alive; });
}

// The others have had their time: but not while this rank itself did not run (M11).
bool NodeImpl::leave_overdue() const {
    const bool woken = core.rules.m11 && core.now - last_tick_ > core.config.heartbeat / 4;
    return core.now > leave_deadline_ && !woken;
}

void NodeImpl::check_leave_done() {
    if (leave_request_ == nullptr || !leave_sent_) return;
    const auto others = core.view.alive() - RankSet::only(core.self());
    if (!goodbye_sent_) {
        const bool all_agree = (others - (leave_ok_ | core.left)).empty() && (!replays() || nobody_missing());
        // What was sent before goes before: nobody need have waited for it.
        const bool sends = std::any_of(comms.begin(), comms.end(), [](const auto& c) { return c.second->has_small_sends(); });
        // Who has not agreed may lack a result that nobody has but those who leave (U): a vote is let come to its end, and then they have their
        // time, in which a result that it gives them arrives. Not for ever: the cells may not answer.
        const auto owes = [](const auto& c) { return c.second->owes(); };
        if (!all_agree && !replays() && std::any_of(comms.begin(), comms.end(), owes))
            leave_deadline_ = std::max(leave_deadline_, std::min(core.now + leave_timeout(), last_leave_deadline_));
        if ((!all_agree || sends) && !leave_overdue() && core.dead_end()) return;
        goodbye_sent_ = true;
        leave_deadline_ = core.now + leave_timeout();  // it has to get out: an exit without it looks like a death (M10)
        FrameHeader h;
        h.kind = FrameKind::Goodbye;
        for (int s : others.list()) core.sender.send(s, h);  // those that have left, too, may still run and wonder about our exit
    }
    // A full link: the goodbye is still here. Or a view that this rank has asked for: it may have to tell all.
    if ((!core.sender.idle() || view_busy_) && !leave_overdue() && !core.authority_lost) return;
    auto request = std::move(leave_request_);
    leave_request_ = nullptr;
    core.finish(request, {});
}

}  // namespace ftcomm
