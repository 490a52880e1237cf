// The job view's changes: evidence and suspicion in, compare-and-set of the head cell, announcement out. Evidence only decides how
// soon somebody proposes; what holds is what the cell says (M1, M2, M4, M11, M12).
#include <algorithm>

#include "base/check.h"
#include "base/failpoint.h"
#include "channel/spread.h"
#include "communicator/node_impl.h"

namespace ftcomm {

void NodeImpl::on_evidence(int slot, std::uint32_t incarnation, Evidence evidence) {
    if (slot == core.self() || !core.dead_end()) return;
    // Replay: a process that closed without a goodbye failed. It comes back, and nothing is decided without it.
    if (evidence == Evidence::Left && core.config.log != nullptr) evidence = Evidence::Pidfd;
    if (incarnation > core.view.members[static_cast<std::size_t>(slot)].incarnation && is_confirmed(evidence)) {
        // A replacement that is not in yet, as far as this rank knows. Its admission may be on the way, and this is said only once.
        core.host.trace("join.dead_early");
        dead_early_[slot] = {incarnation, evidence};
        if (const auto it = waiting.find(slot); it != waiting.end() && it->second <= incarnation) waiting.erase(it);
        return;
    }
    if (!core.in_view(slot, incarnation)) return;
    if (evidence == Evidence::Left) core.left.add(slot);  // closed without a goodbye: the same to those who need it
    if (is_confirmed(evidence) || (evidence == Evidence::Reset && !core.rules.m6)) {
        // M10: a rank that said goodbye is not a failure; it goes when somebody needs it (see removals_due).
        confirmed_[slot] = core.left.has(slot) && core.rules.m10 ? Evidence::Left : evidence;
        if (confirmed_[slot] != Evidence::Left) suspected(slot, evidence, 0);
    } else if (evidence == Evidence::Reset) {
        reset_.try_emplace(slot, Reset{core.now, core.now}).first->second.last = core.now;
    }
    propose_view();
}

void NodeImpl::on_tick() {
    const auto gap = core.now - last_tick_;
    last_tick_ = core.now;
    const bool did_not_run = gap > core.config.heartbeat / 4 && core.rules.m11;
    if (did_not_run) leave_deadline_ += gap;
    if (leave_request_ != nullptr && leave_overdue()) check_leave_done();
    if (!core.dead_end()) return;
    tell_progress();
    for (std::size_t i = 0; i < active_.size(); ++i) active_[i]->on_tick();
    let_rest();
    if (join_request_ != nullptr && core.now >= next_join_request_) send_join_requests();
    if (did_not_run) {
        // M11: it was this rank that did not run. What was sent meanwhile is still unread: no complaint may rest on it. And it
        // may itself have been voted out.
        core.host.trace("own_gap");
        for (auto& h : heard_) h = core.now;
        reset_ = {};
        read_view(false);
        return;
    }
    propose_view();
}

// Whoever is heard after a reset is no longer in doubt: the wait of M11 may be over before the next tick.
void NodeImpl::reconsider_resets() {
    if (!reset_.empty()) propose_view();
}

void NodeImpl::propose_view() {
    if (view_busy_ || core.solo || !core.dead_end()) return;
    const auto due = removals_due();
    if (due.empty()) return;
    JobView next = core.view;
    next.epoch += 1;
    next.parent = core.view.nonce;
    next.nonce = core.random();
    for (const auto& [slot, evidence] : due) {
        auto& m = next.members[static_cast<std::size_t>(slot)];
        m.alive = false;
        m.evidence = evidence;
    }
    core.host.trace("view.propose");
    FT_POINT("view.before");
    compare_and_set_view(next);
}

void NodeImpl::compare_and_set_view(const JobView& desired) {
    view_busy_ = true;
    auto bytes = desired.encode();
    proposed_view_ = bytes;
    core.cells.compare_and_set(
        Node::view_key(core.config.job), core.view_bytes, bytes, [this, bytes](CellClient::Result result, const Bytes& value) {
            view_busy_ = false;
            if (result == CellClient::Result::Conflict && !core.rules.m1) result = CellClient::Result::Swapped;
            if (result == CellClient::Result::Lost) {
                core.authority_lost = true;
                return;
            }
            if (result == CellClient::Result::Conflict) {
                core.host.trace("view.conflict");
                if (!core.rules.m2) {  // rule M2 switched off: "somebody was first; write mine over it"
                    core.view_bytes = value;
                    core.cells.compare_and_set(
                        Node::view_key(core.config.job), value, bytes,
                        [this, bytes](CellClient::Result, const Bytes&) { apply_view(bytes, ViewFrom::Winner); });
                    return;
                }
            }
            FT_POINT("view.after");
            const bool won = result == CellClient::Result::Swapped;
            apply_view(won ? bytes : value, won ? ViewFrom::Winner : ViewFrom::Cell);
            try_admit();
            propose_view();
        });
    if (!core.rules.m4) apply_view(bytes, ViewFrom::Winner);
}

// must: nothing can go on without it. Otherwise a lost authority is found out by the first who has something to decide: until
// then the job works as well without.
void NodeImpl::read_view(bool must) {
    if (view_reading_) return;
    view_reading_ = true;
    // Looked at before the read: whoever died after that may have let this rank in first.
    const bool hopeless = nobody_left_to_join();
    core.cells.read(Node::view_key(core.config.job), [this, must, hopeless](CellClient::Result result, const Bytes& value) {
        view_reading_ = false;
        if (result == CellClient::Result::Lost || value.empty()) {
            if (must) core.authority_lost = true;
            core.host.trace("view.unread");
            return;
        }
        apply_view(value, ViewFrom::Cell);
        if (hopeless && nobody_left_to_join()) give_up_joining();
    });
}

void NodeImpl::tell_view(const RankSet& to) {
    for (int s : to.list()) core.tell_view(s);
}

void NodeImpl::spread_view(const Bytes& view, const RankSet& to) {
    FrameHeader h;
    h.kind = FrameKind::View;
    core.spread_record(h, view, to, [] {});
}

// Of those who go on, the next ones after this rank: as many as it may tell.
RankSet NodeImpl::some_after_self(const RankSet& slots) const {
    RankSet out;
    const int n = core.config.world_size;
    for (int i = 1; i < n && out.count() < core.config.spread_degree; ++i) {
        const int s = (core.self() + i) % n;
        if (slots.has(s)) out.add(s);
    }
    return out;
}

void NodeImpl::on_view_frame(ByteView payload) {
    Spread told;
    FT_CHECK(Spread::decode(payload, &told), "an undecodable job view");
    apply_view(Bytes(told.record.begin(), told.record.end()), ViewFrom::Peer, told.rest);
}

// Who learned it from the authority tells others. The winner of the compare-and-set tells all. The others who asked for a change tell
// some: the winner may have died before it could. (All of them would be too many: where each rank finds out by itself that another one is
// silent, nearly all ask. And if those who have lost are few, and die, too: then there will be another view, whose winner tells all.)
void NodeImpl::apply_view(const Bytes& bytes, ViewFrom from, const RankSet& rest) {
    if (core.stale) return;
    if (const auto epoch = JobView::epoch_of(bytes);
        epoch && *epoch <= core.view.epoch) {  // known, as most that come with a death are
        spread_view(bytes, rest & core.view.alive());
        return;
    }
    const auto decoded = JobView::decode(bytes);
    FT_CHECK(decoded.has_value() && decoded->members.size() == core.view.members.size(), "an undecodable job view");
    // Its own: that one who has lost tells of it is as good as the authority's answer, which may be long in coming, or lost.
    if (bytes == proposed_view_ && core.rules.m14) from = ViewFrom::Winner;
    FT_CHECK(decoded->boot == core.config.boot || !core.rules.m3, "a view of another authority");
    for (int s : (core.view.alive() - decoded->alive()).list())
        if (s != core.self()) core.transport.drain(s);  // M10: may finish operations, or bring its goodbye
    look();  // the same of what it has shown
    if (decoded->epoch <= core.view.epoch) {  // draining brought a newer one
        spread_view(bytes, rest & core.view.alive());
        return;
    }

    const auto before = core.view;
    core.view = *decoded;
    core.view_bytes = bytes;
    const auto& me = core.view.members[static_cast<std::size_t>(core.self())];
    const bool tells = from != ViewFrom::Peer && !core.solo;
    core.host.trace("view.apply");

    RankSet stay, came;
    for (std::size_t i = 0; i < core.view.members.size(); ++i) {
        const int slot = static_cast<int>(i);
        const auto& was = before.members[i];
        const auto& is = core.view.members[i];
        if (slot == core.self()) continue;
        if (was.alive && is.alive && is.incarnation == was.incarnation) stay.add(slot);
        else if (was.alive) {
            if (tells) core.tell_view(slot);  // while the link still leads to who is out: it may live
            core.transport.detach(slot);
            core.sender.drop_slot(slot);
            partial_.erase(slot);
            confirmed_.erase(slot);
            reset_.erase(slot);
            reported_.remove(slot);
            leavers_.erase(slot);
            leave_ok_.remove(slot);
            admit_votes_.erase(slot);
            leave_ok_.remove(slot);
            core.left.remove(slot);
            core.may_leave.remove(slot);
            NodeEvent e;
            e.kind = NodeEvent::Kind::Removed;
            e.slot = slot;
            e.incarnation = was.incarnation;
            e.evidence = is.evidence;
            core.event(std::move(e));
        }
        if (is.alive && (!was.alive || is.incarnation != was.incarnation)) {
            core.transport.attach(slot, is.incarnation);
            came.add(slot);
            core.left.remove(slot);
            core.may_leave.remove(slot);
            if (const auto it = waiting.find(slot); it != waiting.end() && it->second <= is.incarnation) waiting.erase(it);
        } else if (!is.alive && waiting.count(slot) > 0) {
            core.transport.attach(slot, waiting[slot]);  // it asked before its predecessor was out
        }
        heard_[i] = core.now;  // M11: a complaint is settled once per epoch
        if (const auto it = reset_.find(slot); it != reset_.end()) it->second = {core.now, core.now};
    }
    // Not before they are attached: this rank may hear of a newcomer from the cell before it has heard its join request, and then
    // there is no link to it until here.
    if (tells) tell_view(came);
    if (tells && from == ViewFrom::Winner) spread_view(bytes, stay);
    else if (tells) tell_view(some_after_self(stay - core.left));
    else spread_view(bytes, rest & core.view.alive());
    NodeEvent changed;
    changed.kind = NodeEvent::Kind::ViewChanged;
    changed.ranks = core.view.alive();
    core.event(std::move(changed));

    const bool self_in = me.alive && me.incarnation == core.config.incarnation;
    if (core.solo ? me.incarnation > core.config.incarnation || (me.incarnation == core.config.incarnation && !me.alive)
                  : !self_in) {
        core.stale = true;
        core.host.trace("stale");
        if (!core.gives_up) return;  // this rank's own doing
        NodeEvent e;
        e.kind = NodeEvent::Kind::Stale;
        if (me.evidence == Evidence::Group) e.evidence = me.evidence;
        core.event(std::move(e));
        return;
    }
    const bool self_came = core.solo && self_in;
    if (core.solo && !self_came && join_request_ != nullptr && !came.empty()) send_join_requests();  // they have not heard it
    if (core.view.admissions > before.admissions) {
        core.gives_up = {};  // somebody has come, after all
        on_admission(came, self_came);
    }
    for (auto& [id, comm] : all_awake()) comm->on_view();
    restart_timers(core.view.admissions == before.admissions ? &before : nullptr);
    if (admit_request_ != nullptr && admit_voted_) send_admit_vote();
    check_leave_done();
    std::vector<Held> early;
    early.swap(early_);
    for (auto& f : early) on_frame(f.slot, f.incarnation, f.header, f.payload);
    for (auto& [id, comm] : comms) comm->resume();  // all awake since on_view()
    for (int s : came.list()) {
        const auto it = dead_early_.find(s);
        if (it == dead_early_.end()) continue;
        const auto death = it->second;
        if (death.incarnation > core.view.members[static_cast<std::size_t>(s)].incarnation) continue;
        dead_early_.erase(it);
        on_evidence(s, death.incarnation, death.evidence);
    }
    for (const auto& [slot, incarnation] : std::map(waiting)) {
        const auto& m = core.view.members[static_cast<std::size_t>(slot)];
        if (m.alive && m.incarnation < incarnation) on_evidence(slot, m.incarnation, Evidence::Reborn);
    }
}

}  // namespace ftcomm
