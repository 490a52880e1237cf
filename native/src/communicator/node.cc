// The node's inputs, posts and queries: each input sets the clock, does its work and settles what it leaves behind.
#include "communicator/node.h"

#include <algorithm>

#include "communicator/checkpoints.h"
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
        case NodeEvent::Kind::CaughtUp: return "caught_up";
        case NodeEvent::Kind::JoinWaiting: return "join_waiting";
        case NodeEvent::Kind::Restored: return "restored";
    }
    return "unknown";
}

Node::Node(NodeConfig config, Transport& transport, Authority& authority, NodeHost& host, Time now)
    : impl_(std::make_unique<NodeImpl>(std::move(config), transport, authority, host, now)) {}
Node::~Node() = default;

std::string Node::view_key(const std::string& job) { return job + "/view"; }

Bytes Node::make_initial_view(const std::string& job, std::uint64_t boot, const std::vector<std::uint32_t>& incarnations,
                              const RankSet& finished, const std::vector<std::int32_t>& groups, bool crowded) {
    JobView v;
    v.groups = groups;
    v.crowded = crowded;
    v.job = job;
    v.epoch = 1;
    v.boot = boot;
    v.nonce = boot;
    for (std::size_t slot = 0; slot < incarnations.size(); ++slot) {
        const bool left = finished.has(static_cast<int>(slot));
        v.members.push_back({incarnations[slot], !left, left ? Evidence::Left : Evidence::None});
    }
    return v.encode();
}

namespace {
// Every input: set the clock, do it, then settle what it left behind.
class Input {
public:
    Input(NodeImpl& impl, Time now) : impl_(impl) {
        if (now > impl_.core.now) impl_.core.now = now;
    }
    ~Input() {
        impl_.settle();
        impl_.watch();
    }
    Input(const Input&) = delete;
    Input& operator=(const Input&) = delete;

private:
    NodeImpl& impl_;
};

// One that comes from outside. The io thread runs on for a while after halt(), and brings what others send: a decision would start what was
// halted, from buffers that are the callers' again, and others would return with it.
template <class F>
void hear(NodeImpl& impl, Time now, F what) {
    if (impl.halted) return;
    Input input(impl, now);
    what();
}

RequestPtr failed(NodeImpl& impl, Code code, const std::string& text) {
    auto r = std::make_shared<Request>();
    impl.core.finish(r, Status::error(code, text));
    return r;
}
}  // namespace

void Node::on_frame(Time now, int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload) {
    hear(*impl_, now, [&] { impl_->on_frame(slot, incarnation, header, payload); });
}
std::byte* Node::place(int slot, std::uint32_t incarnation, const FrameHeader& header) const {
    return impl_->place(slot, incarnation,
                        header);  // also when halted: a connection that breaks now takes with it what is on its way out
}
void Node::on_writable(Time now, int slot) {
    hear(*impl_, now, [&] {
        impl_->core.sender.on_writable(slot);
        impl_->on_writable(slot);
    });
}
void Node::on_evidence(Time now, int slot, std::uint32_t incarnation, Evidence evidence) {
    hear(*impl_, now, [&] { impl_->on_evidence(slot, incarnation, evidence); });
}
void Node::on_heard(Time now, int slot, std::uint32_t incarnation) {
    hear(*impl_, now, [&] {
        impl_->on_heard(slot, incarnation);
        impl_->reconsider_resets();
    });
}
void Node::on_cell(Time now, CellReply reply) {
    hear(*impl_, now, [&] { impl_->core.cells.on_reply(reply); });
}
void Node::look(Time now) {
    hear(*impl_, now, [&] { impl_->look(); });
}
bool Node::has_work() const { return impl_->core.has_work || impl_->late.is_due(); }
bool Node::has_idle_work() const { return impl_->late.has_work(); }
void Node::halt() {
    impl_->halted = true;
    impl_->core.has_work = false;
    (void)impl_->late.flush();
    impl_->late.release_all();
    for (auto& [id, comm] : impl_->comms) comm->halt();
    impl_->watch();
}
void Node::work(Time now) {
    hear(*impl_, now, [&] { impl_->work(); });
}
void Node::on_tick(Time now) {
    hear(*impl_, now, [&] {
        impl_->late.on_tick();
        impl_->on_tick();
    });
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
#define FTCOMM_WITH_CHECKPOINTS(id) \
    FTCOMM_WITH_COMM(id);           \
    if (c->checkpoints() == nullptr) return failed(*impl_, Code::Invalid, "checkpoints in the log need the policy replay")

void Node::reuse(RequestPtr request) { impl_->core.reuse(std::move(request)); }
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
RequestPtr Node::comm_resume(Time now, CommId comm, const std::string& tag) {
    FTCOMM_WITH_CHECKPOINTS(comm);
    return c->checkpoints()->resume(tag, false);
}
RequestPtr Node::comm_resume_noted(Time now, CommId comm, const std::string& tag) {
    FTCOMM_WITH_CHECKPOINTS(comm);
    return c->checkpoints()->resume(tag, true);
}
RequestPtr Node::comm_commit(Time now, CommId comm, const std::string& tag) {
    FTCOMM_WITH_CHECKPOINTS(comm);
    return c->checkpoints()->commit(tag);
}
RequestPtr Node::comm_ready(Time now, CommId comm) {
    FTCOMM_WITH_COMM(comm);
    return c->ready();
}
#undef FTCOMM_WITH_CHECKPOINTS
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
std::vector<std::string> Node::comm_checkpoints(CommId comm) const {
    const auto* c = impl_->look_up(comm);
    return c != nullptr && c->checkpoints() != nullptr ? c->checkpoints()->tags() : std::vector<std::string>{};
}

Status Node::comm_note(Time now, CommId comm, const std::string& tag) {
    Input input(*impl_, now);
    auto* c = impl_->find(comm);
    if (c == nullptr) return Status::error(Code::Invalid, "there is no such communicator");
    return c->checkpoints() != nullptr ? c->checkpoints()->note(tag)
                                       : Status::error(Code::Invalid, "note " + tag + " on communicator " + c->spec().name +
                                                                          ": notes need the policy replay");
}
std::vector<std::string> Node::comm_notes(CommId comm) const {
    const auto* c = impl_->look_up(comm);
    return c != nullptr && c->checkpoints() != nullptr ? c->checkpoints()->notes() : std::vector<std::string>{};
}

void Node::comm_log_position(CommId comm, std::uint64_t iteration, std::optional<std::uint32_t> micro_batch) {
    if (auto* c = impl_->find(comm)) c->set_log_position(iteration, micro_batch);
}

bool Node::comm_hollow(CommId comm, bool on) {
    auto* c = impl_->find(comm);
    if (c == nullptr || c->messages() == nullptr) return false;
    c->messages()->set_hollow(on);
    return true;
}

std::optional<Node::Ahead> Node::comm_ahead(CommId comm) {
    auto* c = impl_->find(comm);
    if (c == nullptr || c->messages() == nullptr) return std::nullopt;
    auto left = c->messages()->ahead();
    auto done = c->messages()->position();
    return Ahead{c->next_seq() - 1, std::move(done.sent), std::move(done.received), std::move(left.sends),
                 std::move(left.receives)};
}

Status Node::comm_logged(CommId comm, int dst, std::uint64_t seq, LogRecord* out) {
    auto* c = impl_->find(comm);
    if (c == nullptr || c->messages() == nullptr) return Status::error(Code::Invalid, "only under the policy replay");
    return c->messages()->logged(dst, seq, out);
}

Status Node::flush_log(Time now) {
    Input input(*impl_, now);
    return impl_->late.flush();
}
std::uint64_t Node::late_records() const { return impl_->late.records(); }

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
    const auto* c = impl_->look_up(comm);
    return c == nullptr ? RankSet{} : c->alive();
}
std::vector<int> Node::comm_failed(CommId comm) {
    auto* c = impl_->find(comm);
    return c == nullptr ? std::vector<int>{} : c->failed_in_order();
}
void Node::ack_failed(CommId comm, int n) {
    if (auto* c = impl_->find(comm)) c->ack_failed(n);
}
bool Node::comm_revoked(CommId comm) const {
    const auto* c = impl_->look_up(comm);
    return c != nullptr && c->revoked();
}
bool Node::reads_refused() const {
    return std::any_of(impl_->comms.begin(), impl_->comms.end(), [](const auto& c) { return c.second->frames_only(); });
}
bool Node::lacks_windows() const {
    return std::any_of(impl_->comms.begin(), impl_->comms.end(), [](const auto& c) { return c.second->no_windows(); });
}
bool Node::comm_solo(CommId) const { return impl_->core.solo; }
std::uint64_t Node::comm_seq(CommId comm) const {
    const auto* c = impl_->look_up(comm);
    return c == nullptr ? 0 : c->next_seq();
}
int Node::comm_size(CommId comm) const {
    const auto* c = impl_->look_up(comm);
    return c == nullptr ? 0 : static_cast<int>(c->spec().members.size());
}
bool Node::left_with_group() const {
    const auto& core = impl_->core;
    return core.stale && core.view.members[static_cast<std::size_t>(core.self())].evidence == Evidence::Group;
}
bool Node::is_crowded() const { return impl_->core.view.crowded; }

RankSet Node::log_group() const {
    RankSet out;
    for (int s = 0; s < impl_->core.config.world_size; ++s)
        if (impl_->core.view.same_group(impl_->core.self(), s)) out.add(s);
    return out;
}
bool Node::idle() const {
    for (const auto& [id, comm] : impl_->comms)
        if (!comm->idle()) return false;
    return impl_->core.cells.idle() && impl_->core.sender.idle();
}

}  // namespace ftcomm
