// Around the communicators: who gets which frame, communicators that a peer knows first, and what follows each input.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "channel/spread.h"
#include "communicator/checkpoints.h"
#include "communicator/node_impl.h"

namespace ftcomm {

namespace {
NodeConfig behind(NodeConfig config, LateLog& late) {
    if (config.log != nullptr) config.log = &late;
    return config;
}
}  // namespace

NodeImpl::NodeImpl(NodeConfig config, Transport& transport, Authority& authority, NodeHost& host, Time now)
    : late(config.log, config.log_late),
      core(behind(std::move(config), late), transport, authority, host, now),
      heard_(static_cast<std::size_t>(core.config.world_size), now),
      last_tick_(now) {
    const auto view = JobView::decode(core.config.initial_view);
    FT_CHECK(view.has_value() && view->members.size() == static_cast<std::size_t>(core.config.world_size),
             "the initial job view does not fit world size %d", core.config.world_size);
    core.view = *view;
    core.view_bytes = core.config.initial_view;
    core.solo = core.config.joining;
    for (int s : core.view.alive().list())
        if (s != core.self()) transport.attach(s, core.view.members[static_cast<std::size_t>(s)].incarnation);
    if (core.config.log != nullptr && core.solo) join_wait();  // replay: it comes in as soon as it is there
}

const Communicator* NodeImpl::look_up(CommId id) const {
    const auto it = comms.find(id);
    return it == comms.end() ? nullptr : it->second.get();
}

// Whoever asks for it may have something for it to do.
Communicator* NodeImpl::find(CommId id) {
    const auto it = comms.find(id);
    if (it == comms.end()) return nullptr;
    wake(*it->second);
    return it->second.get();
}

void NodeImpl::wake(Communicator& comm) {
    if (std::exchange(comm.awake, true)) return;
    active_.push_back(&comm);
}

std::map<CommId, std::unique_ptr<Communicator>>& NodeImpl::all_awake() {
    for (auto& [id, comm] : comms) wake(*comm);
    return comms;
}

void NodeImpl::let_rest() {
    std::erase_if(active_, [](Communicator* comm) {
        comm->awake = !comm->rests();
        if (!comm->awake) comm->shed();
        return !comm->awake;
    });
}

Status NodeImpl::create_comm(const CommSpec& spec, bool claimed) {
    bool mine = false;
    RankSet seen;
    for (int m : spec.members) {
        if (m < 0 || m >= core.config.world_size)
            return Status::error(Code::Invalid,
                                 "communicator " + spec.name + ": rank " + std::to_string(m) + " is not in the job");
        if (seen.has(m))
            return Status::error(Code::Invalid, "communicator " + spec.name + ": rank " + std::to_string(m) + " is listed twice");
        seen.add(m);
        mine |= m == core.self();
    }
    if (!mine) return Status::error(Code::Invalid, "communicator " + spec.name + " does not contain this rank");
    if ((spec.policy == Policy::Replay) != (core.config.log != nullptr))
        return Status::error(Code::Unsupported,
                             "communicator " + spec.name +
                                 ": the policy replay is the whole job's: give it in the job's "
                                 "options (FTCOMM_POLICY, ftrun --policy), and to every communicator or to none");
    if (spec.id == 0) return Status::error(Code::Invalid, "communicator id 0 is reserved");
    if (!core.abandoned) return core.abandoned;
    if (auto* old = find(spec.id)) {
        if (old->claimed()) return Status::error(Code::Invalid, "communicator " + spec.name + " exists already");
        if (old->spec().members != spec.members || old->spec().policy != spec.policy)
            return Status::error(Code::Mismatch,
                                 "communicator " + spec.name + ": another rank made it with other members or policy");
        old->claim(spec);
        return {};
    }
    auto& comm = comms[spec.id] = std::make_unique<Communicator>(core, spec, claimed);
    wake(*comm);
    // It may have existed elsewhere when replacements came in: the same steps as there, and none for admissions that let
    // nobody into it (its members kept their attempt then).
    for (const auto& admission : admissions_) {
        if (spec.policy == Policy::Replay) break;  // it has looked at the view itself
        RankSet into;
        for (int m : spec.members)
            if (admission.newcomers.has(m)) into.add(m);
        if (into.empty()) continue;
        const AdmitEntry* entry = nullptr;
        for (const auto& a : admission.table)
            if (a.comm == spec.id) entry = &a;
        comm->on_admitted(admission.number, entry, admission.newcomers, admission.alive);
    }
    if (!core.abandoned) return core.abandoned;
    if (!core.solo) comm->on_view();
    auto held = std::move(unknown_[spec.id]);
    unknown_.erase(spec.id);
    for (auto& f : held) {
        if (core.in_view(f.slot, f.incarnation)) comm->on_frame(f.slot, f.header, f.payload);
        else if (f.header.kind == FrameKind::Eager || f.header.kind == FrameKind::Data)
            comm->on_last_words(f.slot, f.incarnation, f.header, f.payload);
    }
    comm->after_last_words();
    return {};
}

// Votes come with the communicator's description, so that a rank which has not made it yet still answers for itself.
Communicator* NodeImpl::find_or_make(CommId id, ByteView payload) {
    if (auto* c = find(id)) return c;
    ByteReader r(payload);
    auto spec = decode_spec(r);
    if (!r.ok() || spec.id != id) return nullptr;
    if (!create_comm(spec, false)) return nullptr;
    return find(id);
}

void NodeImpl::on_frame(int slot, std::uint32_t incarnation, const FrameHeader& h, ByteView payload) {
    if (slot < 0 || slot >= core.config.world_size || slot == core.self() || core.stale) return;
    const auto& m = core.view.members[static_cast<std::size_t>(slot)];
    if (incarnation > m.incarnation || (incarnation == m.incarnation && !m.alive && waiting.count(slot) > 0)) {
        if (h.kind == FrameKind::JoinRequest) {
            on_join_request(slot, incarnation);
        } else {
            early_.push_back({slot, incarnation, h, Bytes(payload.begin(), payload.end())});  // its admission is on the way
        }
        return;
    }
    if (replays() && h.kind == FrameKind::Goodbye && incarnation == m.incarnation && !m.alive) {
        // It had all answers before it heard that it is out. It ends as one that has left, and is not replaced.
        ended_ = true;
        check_leave_done();
        return;
    }
    if (core.rules.m8 && !core.in_view(slot, incarnation)) return;  // M8: a removed incarnation is not heard
    on_heard(slot, incarnation);
    if (core.solo && h.comm != 0) {  // the sender knows of this rank's admission already: wait for the news here
        early_.push_back({slot, incarnation, h, Bytes(payload.begin(), payload.end())});
        return;
    }
    if (h.kind < FrameKind::Enter) {
        auto it = partial_.find(slot);
        if ((h.flags & 1) != 0 || it != partial_.end()) {
            auto& buffer = partial_[slot];
            buffer.insert(buffer.end(), payload.begin(), payload.end());
            if ((h.flags & 1) != 0) return;
            const auto whole = std::move(buffer);
            partial_.erase(slot);
            dispatch(slot, h, whole);
            return;
        }
    }
    dispatch(slot, h, payload);
}

// Of those that on_frame would give to an operation.
std::byte* NodeImpl::place(int slot, std::uint32_t incarnation, const FrameHeader& h) {
    if (slot < 0 || slot >= core.config.world_size || core.stale || core.solo || !core.in_view(slot, incarnation)) return nullptr;
    auto* comm = h.kind == FrameKind::LogPiece ? find(h.comm) : nullptr;
    return comm != nullptr ? comm->place(slot, h) : nullptr;
}

void NodeImpl::dispatch(int slot, const FrameHeader& h, ByteView payload) {
    if (h.comm != 0) {
        auto* comm = is_described(h.kind) ? find_or_make(h.comm, Communicator::description(h.kind, payload)) : find(h.comm);
        if (comm != nullptr) {
            comm->on_frame(slot, h, payload);
        } else {
            // However much it is: a link loses nothing, and a peer sends no more than its own open operations hold.
            unknown_[h.comm].push_back(
                {slot, core.view.members[static_cast<std::size_t>(slot)].incarnation, h, Bytes(payload.begin(), payload.end())});
        }
        return;
    }
    switch (h.kind) {
        case FrameKind::View: on_view_frame(payload); return;
        case FrameKind::AdmitVote: on_admit_vote(slot, payload); return;
        case FrameKind::Leave: on_leave(slot, payload); return;
        case FrameKind::LeaveOk: on_leave_ok(slot); return;
        case FrameKind::Goodbye: on_goodbye(slot); return;
        case FrameKind::Replaying: restart_timers(); return;
        default: return;  // pings have been heard already
    }
}

void NodeImpl::fail_all() {
    dead_end_done_ = true;
    const auto why = core.dead_end();
    if (core.authority_lost && !core.stale) {
        NodeEvent e;
        e.kind = NodeEvent::Kind::AuthorityLost;
        core.event(std::move(e));
    }
    core.admitting = false;
    for (auto& [id, comm] : comms) {
        comm->on_dead_end();
        if (comm->checkpoints() != nullptr) comm->checkpoints()->settle();
    }
    for (auto* r : {&join_request_, &admit_request_, &leave_request_}) {
        if (*r == nullptr || (r == &leave_request_ && goodbye_sent_)) continue;
        auto request = std::move(*r);
        *r = nullptr;
        // Replay: voted out before all had come to their end, it is replaced, and its replacement has to be waited for.
        core.finish(request, r == &leave_request_ && core.config.log == nullptr ? Status{} : why);
    }
}

// Each time another communicator comes first: one that always has more to send would fill the link for ever.
void NodeImpl::on_writable(int slot) {
    const auto n = active_.size(), first = next_writable_++;
    for (std::size_t i = 0; i < n; ++i) active_[(first + i) % n]->on_writable(slot);
}

// A piece for each communicator in turn.
void NodeImpl::work() {
    core.has_work = false;
    bool more = false;
    for (std::size_t i = 0; i < active_.size(); ++i) more |= active_[i]->work();
    core.has_work |= more;
    if (!more) late.work();  // what goes out is logged on its way
}

void NodeImpl::look() {
    for (std::size_t i = 0; i < core.lookers.size(); ++i) core.lookers[i]->look();
}

void NodeImpl::watch() {
    if (!std::exchange(core.words_changed, false)) return;
    words_.clear();
    std::erase_if(core.lookers, [this](const Communicator* comm) {
        const auto before = words_.size();
        comm->add_words(words_);
        return words_.size() == before;
    });
    core.transport.watch_words(words_);
}

void NodeImpl::settle() {
    if (core.agreements > 0)
        for (auto* comm : active_)
            if (comm->checkpoints() != nullptr) comm->checkpoints()->settle();
    if (core.at_dead_end()) {
        if (!dead_end_done_) fail_all();
        if (goodbye_sent_) check_leave_done();  // voted out because it leaves: some have not heard the goodbye yet
        return;
    }
    const auto at_rest = [](const auto& entry) { return entry.second->quiescent(); };
    if (admit_request_ != nullptr && !admit_voted_ && std::all_of(comms.begin(), comms.end(), at_rest)) send_admit_vote();
    if (core.config.log != nullptr && !waiting.empty()) admit_returned();
    if (core.wants_view) {
        core.wants_view = false;
        read_view(true);
    }
    if (!leavers_.empty()) answer_leavers();
    if (leave_sent_) check_leave_done();
    if (!core.gives_up || (!core.left.empty() && !(core.left & core.view.alive()).empty())) propose_view();
}

}  // namespace ftcomm
