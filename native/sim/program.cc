#include "sim/program.h"

#include <algorithm>

#include "sim/data.h"
#include "sim/world.h"

namespace ftcomm::sim {

const char* to_string(Call call) {
    switch (call) {
        case Call::Collective: return "collective";
        case Call::Send: return "send";
        case Call::Recv: return "recv";
        case Call::Agree: return "agree";
        case Call::Shrink: return "shrink";
        case Call::Admit: return "admit";
        case Call::Join: return "join_wait";
        case Call::Leave: return "leave";
    }
    return "?";
}

void Program::start() {
    const auto& s = world_.scenario();
    handles_.resize(s.comms.size());
    for (std::size_t c = 0; c < s.comms.size(); ++c) handles_[c] = {100 + c, s.comms[c].members, false, false};
    world_.wake_program(self_, world_.random().between(0, 5 * kMs));
}

void Program::create_comms(int group) {
    const auto& s = world_.scenario();
    for (std::size_t c = 0; c < handles_.size(); ++c) {
        auto& h = handles_[c];
        if (h.created || s.comms[c].created_at > group) continue;
        h.created = true;
        // A replacement takes part in lossy communicators; under raise the survivors have shrunk.
        const bool mine = std::find(h.members.begin(), h.members.end(), self_.slot) != h.members.end();
        if (!mine || (self_.incarnation > 0 && s.comms[c].policy == Policy::Raise)) continue;
        create(static_cast<int>(c));
    }
}

void Program::create(int comm_index) {
    const auto& plan = world_.scenario().comms[static_cast<std::size_t>(comm_index)];
    const auto& h = handles_[static_cast<std::size_t>(comm_index)];
    CommSpec spec;
    spec.id = h.id;
    spec.name = plan.name;
    spec.members = h.members;
    spec.policy = plan.policy;
    spec.timeout = plan.timeout;
    Status status;
    world_.input(self_, [&](Node& node, Time now) { status = node.create_comm(now, spec); });
    if (self_.running() && !status.ok() && status.code != Code::StaleEpoch && status.code != Code::NoAuthority)
        world_.violate("API", "create_comm(%s) on slot %d: %s", spec.name.c_str(), self_.slot, status.message.c_str());
}

OpenCall* Program::find(const RequestPtr& request) {
    for (auto* call : open_)
        if (call->request == request) return call;
    return nullptr;
}

Bytes* Program::memory(std::uint64_t bytes) {
    memory_.push_back(std::make_unique<Bytes>(bytes, std::byte{0xee}));
    return memory_.back().get();
}

std::unique_ptr<OpenCall> Program::make(Call kind, int step, int comm_index) {
    auto call = std::make_unique<OpenCall>();
    call->call = kind;
    call->step = step;
    call->comm_index = comm_index;
    if (comm_index >= 0) {
        const auto& h = handles_[static_cast<std::size_t>(comm_index)];
        call->comm = h.id;
        call->members = h.members;
        const auto at = std::find(h.members.begin(), h.members.end(), self_.slot);
        call->rank = static_cast<int>(at - h.members.begin());
    }
    call->posted = world_.now();
    return call;
}

void Program::add(std::unique_ptr<OpenCall> call, RequestPtr request) {
    if (!self_.running()) {  // died in the middle of the call: its memory stays, nobody looks at the result
        calls_.push_back(std::move(call));
        return;
    }
    FT_CHECK(request != nullptr, "%s of slot %d gave no request", to_string(call->call), self_.slot);
    call->request = std::move(request);
    OpenCall& c = *call;
    open_.push_back(&c);
    calls_.push_back(std::move(call));
    if (c.request->done.load() && !c.checked) {
        world_.checker().completed(self_, c);
        completed(c);
    }
}

// Checked, and from now on the memory is the user's again, who writes over it at once.
void Program::completed(OpenCall& call) {
    call.checked = true;
    for (Bytes* b : {call.send, call.recv})
        if (b != nullptr) std::fill(b->begin(), b->end(), std::byte{0xa5});
    world_.progress();
}

void Program::check_scribbles() {
    for (const auto& call : calls_) {
        if (!call->checked) continue;
        for (const Bytes* b : {call->send, call->recv})
            if (b != nullptr && std::any_of(b->begin(), b->end(), [](std::byte x) { return x != std::byte{0xa5}; })) {
                world_.violate("B", "slot %d: a buffer of %s at step %d was written after its request was done", self_.slot,
                               to_string(call->call), call->step);
                return;
            }
    }
}

void Program::fail_request(int step) {
    for (auto* call : open_)
        if (call->step == step && call->call == Call::Collective && !call->request->done.load()) {
            auto request = call->request;
            world_.input(self_, [&](Node& node, Time now) { node.fail_request(now, request, Code::Interrupted); });
            return;
        }
}

void Program::revoke(int comm_index) {
    const auto id = handles_[static_cast<std::size_t>(comm_index)].id;
    world_.input(self_, [id](Node& node, Time now) { node.revoke(now, id); });
}

int Program::admit_step() const {
    for (const auto* call : open_)
        if (call->call == Call::Admit) return call->step;
    return -1;
}

// A replacement takes over the position: in the script, and in each communicator from one who is in it.
void Program::admitted_like(const std::vector<const Program*>& survivors, int step) {
    const auto& s = world_.scenario();
    const auto is_in = [](const Handle& h, int slot) {
        return std::find(h.members.begin(), h.members.end(), slot) != h.members.end();
    };
    for (std::size_t c = 0; c < handles_.size(); ++c) {
        auto& h = handles_[c];
        h.gone = true;
        for (const auto* other : survivors)
            if (is_in(other->handles_[c], other->self_.slot)) h = other->handles_[c];
        if (s.comms[c].policy == Policy::Raise) h.gone = true;
        // A communicator that the survivors have shrunk meanwhile, with this slot in it.
        if (is_in(h, self_.slot) && !h.gone && h.id != 100 + c) create(static_cast<int>(c));
    }
    group_ = static_cast<int>(std::upper_bound(s.groups.begin(), s.groups.end(), step) - s.groups.begin());
    next_step_ = s.groups[static_cast<std::size_t>(group_)];
    phase_ = Phase::Post;
}

void Program::run() {
    const auto& s = world_.scenario();
    while (self_.running()) {
        switch (phase_) {
            case Phase::Begin: {
                create_comms(0);
                if (!self_.running()) return;
                if (self_.incarnation == 0) {
                    phase_ = Phase::Post;
                    break;
                }
                RequestPtr request;
                auto call = make(Call::Join, -1, -1);
                world_.input(self_, [&](Node& node, Time now) { request = node.join_wait(now); });
                add(std::move(call), request);
                phase_ = Phase::Joining;
                break;
            }
            case Phase::Joining:
                if (!wait_done()) return;
                if (stop_) {
                    phase_ = Phase::Finished;
                    world_.exited(self_);
                    return;
                }
                break;
            case Phase::Post: {
                const int leave_at = self_.incarnation == 0 ? s.leave_at[static_cast<std::size_t>(self_.slot)] : -1;
                if (group_ >= s.group_count() ||
                    (group_ == leave_at && next_step_ == s.groups[static_cast<std::size_t>(group_)])) {
                    RequestPtr request;
                    auto call = make(Call::Leave, -1, -1);
                    world_.input(self_, [&](Node& node, Time now) { request = node.leave(now); });
                    add(std::move(call), request);
                    phase_ = Phase::Leaving;
                    break;
                }
                if (!post_group()) return;
                phase_ = Phase::Wait;
                break;
            }
            case Phase::Wait:
                if (!wait_done()) return;
                after_group();
                break;
            case Phase::Recover:
                if (!wait_done()) return;
                after_group();
                break;
            case Phase::Leaving:
                if (!wait_done()) return;
                self_.left = true;
                phase_ = Phase::Finished;
                world_.exited(self_);
                return;
            case Phase::Finished: return;
        }
    }
}

bool Program::post_group() {
    const auto& s = world_.scenario();
    const int first = s.groups[static_cast<std::size_t>(group_)], end = s.groups[static_cast<std::size_t>(group_) + 1];
    if (next_step_ == first && !napped_) {
        create_comms(group_);
        world_.begins_group(self_, group_);
    }
    while (self_.running() && next_step_ < end) {
        const Step& step = s.steps[static_cast<std::size_t>(next_step_)];
        if (step.sleeping_slot == self_.slot && !napped_) {
            napped_ = true;
            world_.progress();
            world_.wake_program(self_, step.nap);
            return false;
        }
        napped_ = false;
        post(next_step_++);
        if (next_step_ < end && world_.random().chance(0.2)) {
            world_.wake_program(self_, world_.random().between(0, 2 * kMs));
            return false;
        }
    }
    return self_.running();
}

void Program::post(int index) {
    const Step& step = world_.scenario().steps[static_cast<std::size_t>(index)];
    if (step.kind == StepKind::Admit) {
        RequestPtr request;
        auto call = make(Call::Admit, index, -1);
        world_.checker().posted(self_, *call);
        world_.input(self_, [&](Node& node, Time now) { request = node.admit(now); });
        add(std::move(call), request);
        return;
    }
    const auto& h = handles_[static_cast<std::size_t>(step.comm)];
    if (h.gone || std::find(h.members.begin(), h.members.end(), self_.slot) == h.members.end()) return;
    switch (step.kind) {
        case StepKind::Collective: {
            if (std::find(to_shrink_.begin(), to_shrink_.end(), step.comm) != to_shrink_.end()) return;  // given up
            if (step.quitting_slot == self_.slot) {
                revoke(step.comm);
                to_shrink_.push_back(step.comm);
                world_.counters().add("inject revoke instead of entering");
                return;
            }
            auto call = make(Call::Collective, index, step.comm);
            post_collective(*call, step);
            world_.checker().posted(self_, *call);
            RequestPtr request;
            world_.trace().text(world_.now(), "%d.%u posts step %d: %s of %llu on %s", self_.slot, self_.incarnation, index,
                                to_string(call->desc.kind), static_cast<unsigned long long>(call->desc.count),
                                world_.scenario().comms[static_cast<std::size_t>(step.comm)].name.c_str());
            const auto& c = *call;
            world_.input(self_, [&](Node& node, Time now) { request = node.collective(now, c.comm, c.desc); });
            add(std::move(call), request);
            if (!self_.running()) return;
            auto& r = world_.random();
            if (step.failing_slot == self_.slot)
                world_.queue().push(world_.now() + r.between(0, 5 * kMs), EventKind::FailRequest, self_.id, index);
            if (step.revoking_slot == self_.slot)
                world_.queue().push(world_.now() + r.between(0, 2 * kMs), EventKind::Revoke, self_.id, step.comm);
            return;
        }
        case StepKind::Agree: {
            auto call = make(Call::Agree, index, step.comm);
            world_.checker().posted(self_, *call);
            RequestPtr request;
            const std::int64_t flag = ~(std::int64_t{1} << self_.slot);
            const auto comm = call->comm;
            world_.input(self_, [&](Node& node, Time now) { request = node.agree(now, comm, flag); });
            add(std::move(call), request);
            return;
        }
        case StepKind::Ring: post_ring(index); return;
        case StepKind::Any: {
            const int size = static_cast<int>(h.members.size());
            const int root = step.root % size;
            if (h.members[static_cast<std::size_t>(root)] == self_.slot) {
                any_ = {index, {}, false};
                next_any(index);
                return;
            }
            auto call = make(Call::Send, index, step.comm);
            call->peer = root;
            call->send = memory(step.count);
            fill_message(index, self_.slot, 0, step.count, call->send->data());
            RequestPtr request;
            const auto& c = *call;
            world_.input(self_, [&](Node& node, Time now) {
                request = node.send(now, c.comm, c.send->data(), c.send->size(), root, index);
            });
            add(std::move(call), request);
            return;
        }
        case StepKind::Admit: return;
    }
}

void Program::post_collective(OpenCall& call, const Step& step) {
    OpDesc& d = call.desc;
    const int me = call.rank, size = static_cast<int>(call.members.size()), root = step.root % size;
    d.kind = step.op;
    d.dtype = step.dtype;
    d.op = step.reduce;
    d.algorithm = step.algorithm;
    d.root = root;
    d.count = step.count;
    if (step.reduce == ReduceOp::PremulSum) d.factor = 2.0;
    Step drawn = step;
    if (step.odd_slot == self_.slot) {
        if (d.kind == OpKind::Barrier || d.kind == OpKind::Gather || d.kind == OpKind::Scatter || d.kind == OpKind::AllToAll) {
            d.kind = OpKind::AllReduce;
            d.count = 3;
        } else {
            d.count += 1;
        }
    }
    const std::uint64_t item = size_of(d.dtype);
    const auto sum = [&](auto part) {
        std::uint64_t n = 0;
        for (int k = 0; k < size; ++k) n += part(k);
        return n;
    };
    const auto layout = [&](auto part, std::vector<std::uint64_t>& counts, std::vector<std::uint64_t>& offsets) {
        std::uint64_t at = 0;
        for (int k = 0; k < size; ++k) {
            counts.push_back(part(k));
            offsets.push_back(at);
            at += part(k);
        }
    };
    const auto input = [&](std::uint64_t count) {
        Bytes* b = memory(count * item);
        fill(drawn, call.step, self_.slot, 0, count, b->data());
        return b;
    };
    switch (d.kind) {
        case OpKind::AllReduce:
            call.recv = input(d.count);
            call.before = call.seen = *call.recv;
            break;
        case OpKind::Broadcast: call.recv = me == root ? input(d.count) : memory(d.count * item); break;
        case OpKind::Reduce:
            call.send = input(d.count);
            if (me == root) call.recv = memory(d.count * item);
            break;
        case OpKind::AllGather:
            call.send = input(d.count);
            call.recv = memory(d.count * item * static_cast<std::uint64_t>(size));
            break;
        case OpKind::ReduceScatter:
            call.send = input(d.count * static_cast<std::uint64_t>(size));
            call.recv = memory(d.count * item);
            break;
        case OpKind::Gather: {
            d.count = piece(step, me, root);
            call.send = input(d.count);
            const auto part = [&](int k) { return piece(step, k, root); };
            if (me == root) {
                call.recv = memory(sum(part) * item);
                if (step.uneven) layout(part, d.recv_counts, d.recv_offsets);
            }
            break;
        }
        case OpKind::Scatter: {
            d.count = piece(step, root, me);
            call.recv = memory(d.count * item);
            const auto part = [&](int k) { return piece(step, root, k); };
            if (me == root) {
                call.send = input(sum(part));
                if (step.uneven) layout(part, d.send_counts, d.send_offsets);
            }
            break;
        }
        case OpKind::AllToAll: {
            const auto out = [&](int k) { return piece(step, me, k); };
            const auto in = [&](int k) { return piece(step, k, me); };
            call.send = input(sum(out));
            call.recv = memory(sum(in) * item);
            if (step.uneven) {
                layout(out, d.send_counts, d.send_offsets);
                layout(in, d.recv_counts, d.recv_offsets);
            }
            break;
        }
        case OpKind::Barrier: break;
    }
    if (call.send != nullptr) d.send = call.send->data();
    if (call.recv != nullptr) d.recv = call.recv->data();
}

void Program::post_ring(int index) {
    const Step& step = world_.scenario().steps[static_cast<std::size_t>(index)];
    const auto& members = handles_[static_cast<std::size_t>(step.comm)].members;
    const int size = static_cast<int>(members.size());
    if (size == 1) return;
    const bool sends_first = world_.random().chance(0.5);
    for (int part = 0; part < 4 && self_.running(); ++part) {
        const bool sending = (part < 2) == sends_first;
        auto call = make(sending ? Call::Send : Call::Recv, index, step.comm);
        call->number = part % 2;
        auto& c = *call;
        RequestPtr request;
        if (sending) {
            c.peer = (c.rank + 1) % size;
            c.send = memory(step.count);
            fill_message(index, self_.slot, c.number, step.count, c.send->data());
            world_.input(self_, [&](Node& node, Time now) {
                request = node.send(now, c.comm, c.send->data(), c.send->size(), c.peer, index);
            });
        } else {
            c.peer = (c.rank + size - 1) % size;
            c.recv = memory(step.count);
            world_.input(self_, [&](Node& node, Time now) {
                request = node.recv(now, c.comm, c.recv->data(), c.recv->size(), c.peer, index);
            });
        }
        add(std::move(call), request);
    }
}

// The root of a fan-in: receives from anyone until every rank not known dead has been heard (ULFM: acknowledge, go on).
void Program::next_any(int index) {
    const Step& step = world_.scenario().steps[static_cast<std::size_t>(index)];
    const auto& h = handles_[static_cast<std::size_t>(step.comm)];
    if (any_.over) return;
    const RankSet failed = self_.node->comm_failed(h.id);
    RankSet missing = RankSet::first(static_cast<int>(h.members.size())) - failed - RankSet::of(any_.got);
    auto call = make(Call::Recv, index, step.comm);
    missing.remove(call->rank);
    if (missing.empty()) {
        any_.over = true;
        return;
    }
    call->recv = memory(step.count);
    auto& c = *call;
    RequestPtr request;
    world_.input(self_,
                 [&](Node& node, Time now) { request = node.recv(now, c.comm, c.recv->data(), c.recv->size(), -1, index); });
    add(std::move(call), request);
}

// A receive from anyone, when all who have not been heard are known dead: cancelled, or it would wait for ever.
bool Program::stop_waiting_for_anyone(OpenCall& call) {
    RankSet missing =
        RankSet::first(static_cast<int>(call.members.size())) - self_.node->comm_failed(call.comm) - RankSet::of(any_.got);
    missing.remove(call.rank);
    if (!missing.empty()) return false;
    const auto request = call.request;
    world_.input(self_, [&](Node& node, Time now) { node.fail_request(now, request, Code::Cancelled); });
    return request->done.load();
}

bool Program::wait_done() {
    for (std::size_t i = 0; i < open_.size() && self_.running();) {
        OpenCall& call = *open_[i];
        if (!call.request->done.load()) {
            if (call.request->alarmed && self_.node != nullptr) {  // ULFM: acknowledge, then the receive goes on
                self_.node->ack_failed(call.comm, -1);
                world_.counters().add("program: alarm acknowledged");
                if (stop_waiting_for_anyone(call)) continue;
            }
            ++i;
            continue;
        }
        open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
        i = 0;
        const Code code = call.request->status.code;
        if (code == Code::StaleEpoch || code == Code::NoAuthority) {
            stop_ = true;
            any_.over = true;
            continue;
        }
        const auto& s = world_.scenario();
        switch (call.call) {
            case Call::Collective: {
                const auto kind = s.steps[static_cast<std::size_t>(call.step)].op;
                const bool uniform = kind == OpKind::AllReduce || kind == OpKind::Broadcast || kind == OpKind::AllGather ||
                                     kind == OpKind::Barrier;
                const bool lossy = s.comms[static_cast<std::size_t>(call.comm_index)].policy == Policy::Lossy;
                const bool quit = s.steps[static_cast<std::size_t>(call.step)].quitting_slot >= 0;  // then all shrink
                const bool goes_on = lossy && !quit && (code == Code::PeerFailure || code == Code::Mismatch);
                if (code != Code::Ok && uniform && !goes_on &&
                    std::find(to_shrink_.begin(), to_shrink_.end(), call.comm_index) == to_shrink_.end())
                    to_shrink_.push_back(call.comm_index);
                break;
            }
            case Call::Recv:
                if (any_.over || any_.step != call.step) break;
                if (code == Code::Ok) any_.got.push_back(call.request->source);
                else if (code == Code::PeerFailure) self_.node->ack_failed(call.comm, -1);
                else any_.over = true;
                next_any(call.step);
                break;
            case Call::Shrink: adopt(call); break;
            case Call::Join: {
                if (code != Code::Ok) {
                    stop_ = true;
                    break;
                }
                int step = world_.checker().admit_step_of(self_.slot, self_.incarnation);
                const auto peers = [&](auto visit) {
                    for (auto& other : world_.instances())
                        if (other.get() != &self_ && other->running() && !other->was_stale && !other->program->joining())
                            visit(*other->program);
                };
                if (step < 0)  // nobody has returned from it yet: then all are still in it
                    peers([&](Program& p) {
                        if (p.admit_step() >= 0 && (step < 0 || p.admit_step() < step)) step = p.admit_step();
                    });
                std::vector<const Program*> like;
                peers([&](Program& p) {
                    const bool there =
                        p.admit_step() == step || s.groups[static_cast<std::size_t>(std::min(p.group_, s.group_count()))] > step;
                    if (step >= 0 && there) like.push_back(&p);
                });
                if (step < 0 || like.empty()) {
                    stop_ = true;  // all who admitted it are gone: nothing to go on with
                    break;
                }
                world_.counters().add("inject join completed");
                admitted_like(like, step);
                break;
            }
            default: break;
        }
    }
    return self_.running() && open_.empty();
}

void Program::after_group() {
    if (stop_) {
        phase_ = Phase::Finished;
        world_.exited(self_);
        return;
    }
    if (!to_shrink_.empty()) {
        std::sort(to_shrink_.begin(), to_shrink_.end());
        const int comm = to_shrink_.front();
        to_shrink_.erase(to_shrink_.begin());
        phase_ = Phase::Recover;
        call_shrink(comm);
        return;
    }
    ++group_;
    next_step_ = world_.scenario().groups[static_cast<std::size_t>(group_)];
    phase_ = Phase::Post;
}

void Program::call_shrink(int comm_index) {
    auto call = make(Call::Shrink, -1 - group_, comm_index);
    const auto comm = call->comm;
    if ((group_ + comm_index) % 3 == 0) world_.input(self_, [&](Node& node, Time now) { node.revoke(now, comm); });
    if (!self_.running()) return;
    world_.checker().posted(self_, *call);
    world_.trace().text(world_.now(), "%d.%u shrinks comm %llu", self_.slot, self_.incarnation,
                        static_cast<unsigned long long>(comm));
    RequestPtr request;
    world_.input(self_, [&](Node& node, Time now) { request = node.shrink(now, comm); });
    add(std::move(call), request);
}

void Program::adopt(OpenCall& call) {
    auto& h = handles_[static_cast<std::size_t>(call.comm_index)];
    if (!call.request->status.ok()) {
        h.gone = true;
        world_.counters().add("program: shrink failed");
        return;
    }
    std::vector<int> members;
    for (std::size_t rank = 0; rank < h.members.size(); ++rank)
        if (call.request->survivors.has(static_cast<int>(rank))) members.push_back(h.members[rank]);
    const auto old = h.id;
    h.id = call.request->new_comm;
    h.members = std::move(members);
    create(call.comm_index);
    if (!self_.running()) return;
    if (world_.random().chance(0.5)) world_.input(self_, [old](Node& node, Time now) { node.close_comm(now, old); });
}

std::string Program::where() const {
    static const char* const phases[] = {"begin", "joining", "post", "wait", "recover", "leaving", "finished"};
    std::string out = std::string(phases[static_cast<int>(phase_)]) + " in group " + std::to_string(group_) + ":";
    for (const auto* c : open_)
        if (!c->request->done.load())
            out += std::string(" ") + (c->call == Call::Collective ? to_string(c->desc.kind) : to_string(c->call)) + " step " +
                   std::to_string(c->step) + " comm " + std::to_string(c->comm) + ";";
    return out;
}

}  // namespace ftcomm::sim
