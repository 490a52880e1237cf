#include "communicator/node.h"

#include "base/check.h"
#include "communicator/node_impl.h"

namespace ftcomm {

const char* to_string(NodeEvent::Kind kind) {
    switch (kind) {
        case NodeEvent::Kind::Suspected: return "suspected";
        case NodeEvent::Kind::ViewChanged: return "view";
        case NodeEvent::Kind::Removed: return "removed";
        case NodeEvent::Kind::Frozen: return "frozen";
        case NodeEvent::Kind::Decided: return "decided";
        case NodeEvent::Kind::Repaired: return "repaired";
        case NodeEvent::Kind::Failed: return "failed";
        case NodeEvent::Kind::Joined: return "joined";
        case NodeEvent::Kind::Stale: return "stale";
        case NodeEvent::Kind::AuthorityLost: return "authority_lost";
        case NodeEvent::Kind::JoinWaiting: return "join_waiting";
    }
    return "unknown";
}

NodeImpl::NodeImpl(NodeConfig config, Transport& transport, Authority& authority, NodeHost& host, Time now)
    : core(std::move(config), transport, authority, host, now),
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
}

Communicator* NodeImpl::find(CommId id) const {
    const auto it = comms.find(id);
    return it == comms.end() ? nullptr : it->second.get();
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
    if (spec.id == 0) return Status::error(Code::Invalid, "communicator id 0 is reserved");
    if (auto* old = find(spec.id)) {
        if (old->claimed()) return Status::error(Code::Invalid, "communicator " + spec.name + " exists already");
        if (old->spec().members != spec.members || old->spec().policy != spec.policy)
            return Status::error(Code::Mismatch,
                                 "communicator " + spec.name + ": another rank made it with other members or policy");
        old->claim(spec);
        return {};
    }
    auto& comm = comms[spec.id] = std::make_unique<Communicator>(core, spec, claimed);
    // It may have existed elsewhere when replacements came in: the same steps as there, and none for admissions that let
    // nobody into it (its members kept their attempt then).
    for (const auto& admission : admissions_) {
        RankSet into;
        for (int m : spec.members)
            if (admission.newcomers.has(m)) into.add(m);
        if (into.empty()) continue;
        for (const auto& a : admission.table)
            if (a.comm == spec.id) comm->on_admitted(&a, admission.newcomers, admission.alive);
    }
    if (!core.solo) comm->on_view();
    auto held = std::move(unknown_[spec.id]);
    unknown_.erase(spec.id);
    for (auto& f : held) {
        if (core.in_view(f.slot, f.incarnation)) comm->on_frame(f.slot, f.header, f.payload);
    }
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

void NodeImpl::dispatch(int slot, const FrameHeader& h, ByteView payload) {
    if (h.comm != 0) {
        const bool describes = h.kind == FrameKind::Vote || h.kind == FrameKind::Freeze || h.kind == FrameKind::AgreeVote;
        auto* comm = describes ? find_or_make(h.comm, payload) : find(h.comm);
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
        case FrameKind::View: apply_view(Bytes(payload.begin(), payload.end()), false); return;
        case FrameKind::AdmitVote: on_admit_vote(slot, payload); return;
        case FrameKind::Leave: on_leave(slot, payload); return;
        case FrameKind::LeaveOk: on_leave_ok(slot); return;
        case FrameKind::Goodbye: on_goodbye(slot); return;
        default: return;  // pings have been heard already
    }
}

void NodeImpl::settle() {
    if (!core.dead_end()) {
        if (dead_end_done_) return;
        dead_end_done_ = true;
        const auto why = core.dead_end();
        if (core.authority_lost && !core.stale) {
            NodeEvent e;
            e.kind = NodeEvent::Kind::AuthorityLost;
            core.event(std::move(e));
        }
        core.admitting = false;
        for (auto& [id, comm] : comms) comm->on_dead_end();
        for (auto* r : {&join_request_, &admit_request_, &leave_request_}) {
            if (*r == nullptr) continue;
            auto request = std::move(*r);
            *r = nullptr;
            core.finish(request, r == &leave_request_ ? Status{} : why);
        }
        return;
    }
    if (admit_request_ != nullptr && !admit_voted_) {
        for (const auto& [id, comm] : comms)
            if (!comm->quiescent()) return;
        send_admit_vote();
    }
    if (!leavers_.empty()) answer_leavers();
    if (goodbye_sent_) check_leave_done();
    if (!(core.left & core.view.alive()).empty()) propose_view();
}

Node::Node(NodeConfig config, Transport& transport, Authority& authority, NodeHost& host, Time now)
    : impl_(std::make_unique<NodeImpl>(std::move(config), transport, authority, host, now)) {}
Node::~Node() = default;

std::string Node::view_key(const std::string& job) { return job + "/view"; }

Bytes Node::make_initial_view(const std::string& job, std::uint64_t boot, const std::vector<std::uint32_t>& incarnations) {
    JobView v;
    v.job = job;
    v.epoch = 1;
    v.boot = boot;
    v.nonce = boot;
    for (auto i : incarnations) v.members.push_back({i, true, Evidence::None});
    return v.encode();
}

namespace {
// Every input: set the clock, do it, then settle what it left behind.
class Input {
public:
    Input(NodeImpl& impl, Time now) : impl_(impl) {
        if (now > impl_.core.now) impl_.core.now = now;
    }
    ~Input() { impl_.settle(); }
    Input(const Input&) = delete;
    Input& operator=(const Input&) = delete;

private:
    NodeImpl& impl_;
};

RequestPtr failed(NodeImpl& impl, Code code, const std::string& text) {
    auto r = std::make_shared<Request>();
    impl.core.finish(r, Status::error(code, text));
    return r;
}
}  // namespace

void Node::on_frame(Time now, int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload) {
    Input input(*impl_, now);
    impl_->on_frame(slot, incarnation, header, payload);
}
void Node::on_writable(Time now, int slot) {
    Input input(*impl_, now);
    impl_->core.sender.on_writable(slot);
    for (auto& [id, comm] : impl_->comms) comm->on_writable(slot);
}
void Node::on_evidence(Time now, int slot, std::uint32_t incarnation, Evidence evidence) {
    Input input(*impl_, now);
    impl_->on_evidence(slot, incarnation, evidence);
}
void Node::on_heard(Time now, int slot, std::uint32_t incarnation) {
    Input input(*impl_, now);
    impl_->on_heard(slot, incarnation);
}
void Node::on_cell(Time now, CellReply reply) {
    Input input(*impl_, now);
    impl_->core.cells.on_reply(reply);
}
void Node::on_tick(Time now) {
    Input input(*impl_, now);
    impl_->on_tick();
}
Time Node::tick_interval() const { return impl_->tick_interval(); }

Status Node::create_comm(Time now, const CommSpec& spec) {
    Input input(*impl_, now);
    return impl_->create_comm(spec, true);
}

#define FTCOMM_WITH_COMM(id)   \
    Input input(*impl_, now);  \
    auto* c = impl_->find(id); \
    if (c == nullptr) return failed(*impl_, Code::Closed, "no such communicator on this rank: it was closed or never made")

RequestPtr Node::collective(Time now, CommId comm, const OpDesc& desc) {
    FTCOMM_WITH_COMM(comm);
    return c->collective(desc);
}
RequestPtr Node::send(Time now, CommId comm, const void* data, std::uint64_t bytes, int dst, std::int64_t tag) {
    FTCOMM_WITH_COMM(comm);
    return c->send(data, bytes, dst, tag);
}
RequestPtr Node::recv(Time now, CommId comm, void* data, std::uint64_t bytes, int src, std::int64_t tag) {
    FTCOMM_WITH_COMM(comm);
    return c->recv(data, bytes, src, tag);
}
RequestPtr Node::agree(Time now, CommId comm, std::int64_t flag) {
    FTCOMM_WITH_COMM(comm);
    return c->agree(Communicator::AgreeKind::Agree, flag);
}
RequestPtr Node::shrink(Time now, CommId comm) {
    FTCOMM_WITH_COMM(comm);
    return c->agree(Communicator::AgreeKind::Shrink, -1);
}
#undef FTCOMM_WITH_COMM

void Node::revoke(Time now, CommId comm) {
    Input input(*impl_, now);
    if (auto* c = impl_->find(comm)) c->revoke();
}
void Node::fail_request(Time now, const RequestPtr& request, Code why) {
    Input input(*impl_, now);
    for (auto& [id, comm] : impl_->comms)
        if (comm->fail_request(request, why)) return;
}
void Node::close_comm(Time now, CommId comm) {
    Input input(*impl_, now);
    if (auto* c = impl_->find(comm)) c->close();
}
RequestPtr Node::join_wait(Time now) {
    Input input(*impl_, now);
    return impl_->join_wait();
}
RequestPtr Node::admit(Time now) {
    Input input(*impl_, now);
    return impl_->admit();
}
RequestPtr Node::leave(Time now) {
    Input input(*impl_, now);
    return impl_->leave();
}

std::uint64_t Node::epoch() const { return impl_->core.view.epoch; }
bool Node::stale() const { return impl_->core.stale; }
RankSet Node::alive_slots() const { return impl_->core.view.alive(); }
RankSet Node::waiting_slots() const {
    RankSet s;
    for (const auto& [slot, incarnation] : impl_->waiting) s.add(slot);
    return s;
}
std::uint32_t Node::incarnation_of(int slot) const {
    return impl_->core.view.members[static_cast<std::size_t>(slot)].incarnation;
}
RankSet Node::comm_alive(CommId comm) const {
    const auto* c = impl_->find(comm);
    return c == nullptr ? RankSet{} : c->alive();
}
RankSet Node::comm_failed(CommId comm) const {
    const auto* c = impl_->find(comm);
    return c == nullptr ? RankSet{} : c->failed();
}
void Node::ack_failed(CommId comm, int n) {
    if (auto* c = impl_->find(comm)) c->ack_failed(n);
}
bool Node::comm_revoked(CommId comm) const {
    const auto* c = impl_->find(comm);
    return c != nullptr && c->revoked();
}
bool Node::comm_solo(CommId) const { return impl_->core.solo; }
std::uint64_t Node::comm_seq(CommId comm) const {
    const auto* c = impl_->find(comm);
    return c == nullptr ? 0 : c->next_seq();
}
int Node::comm_size(CommId comm) const {
    const auto* c = impl_->find(comm);
    return c == nullptr ? 0 : static_cast<int>(c->spec().members.size());
}
bool Node::idle() const {
    for (const auto& [id, comm] : impl_->comms)
        if (!comm->idle()) return false;
    return impl_->core.cells.idle() && impl_->core.sender.idle();
}

}  // namespace ftcomm
