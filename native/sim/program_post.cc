// What a rank posts at each step of the script, and the memory that it posts it with.
#include "sim/program.h"

#include <algorithm>

#include "sim/data.h"
#include "sim/world.h"

namespace ftcomm::sim {

void Program::post(int index) {
    const Step& step = world_.scenario().steps[static_cast<std::size_t>(index)];
    if (step.kind == StepKind::Admit) {
        RequestPtr request;
        auto call = make(Call::Admit, index, -1);
        world_.checker().posted(self_, *call);
        world_.input(self_, [&](Node& node, Time now) { request = node.admit(now); });
        add(std::move(call), request);
        const auto& shared = handles_[static_cast<std::size_t>(step.comm)];
        const bool first =
            index == world_.scenario().groups[static_cast<std::size_t>(group_)];  // or an operation may be hit here only
        if (step.revoking_slot == self_.slot && first && shared.created && !shared.gone) {
            world_.counters().add("inject revoke during an admission");
            world_.queue().push(world_.now() + world_.random().between(0, 5 * kMs), EventKind::Revoke, self_.id, step.comm);
        }
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
        case StepKind::Web:
        case StepKind::WebSend:
        case StepKind::WebReceive: post_messages(index); return;
        case StepKind::FanIn: post_fan_in(index); return;
        case StepKind::Answer: post_answers(index); return;
        case StepKind::Commit: post_commit(index); return;
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
        } else if (d.kind == OpKind::AllReduce && d.count % 2 == 0) {  // the same, in another way (C8)
            d.algorithm = d.algorithm == Algorithm::Ring ? Algorithm::Flat : Algorithm::Ring;
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
    PerRank per;
    const auto input = [&](std::uint64_t count) {
        Bytes* b = memory(count * item);
        if (world_.scenario().replay)
            fill_rough(d.dtype, mixed(state_, static_cast<std::uint64_t>(call.step * 64 + me)), count, b->data());
        else fill(drawn, call.step, self_.slot, 0, count, b->data());
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
            call.in_place = !world_.scenario().replay && (call.step + me) % 2 == 0;
            break;
        case OpKind::Gather: {
            d.count = piece(step, me, root);
            call.send = input(d.count);
            const auto part = [&](int k) { return piece(step, k, root); };
            if (me == root) {
                call.recv = memory(sum(part) * item);
                if (step.uneven) layout(part, per.recv_counts, per.recv_offsets);
            }
            break;
        }
        case OpKind::Scatter: {
            d.count = piece(step, root, me);
            call.recv = memory(d.count * item);
            const auto part = [&](int k) { return piece(step, root, k); };
            if (me == root) {
                call.send = input(sum(part));
                if (step.uneven) layout(part, per.send_counts, per.send_offsets);
            }
            break;
        }
        case OpKind::AllToAll: {
            const auto out = [&](int k) { return piece(step, me, k); };
            const auto in = [&](int k) { return piece(step, k, me); };
            call.send = input(sum(out));
            call.recv = memory(sum(in) * item);
            if (step.uneven || step.counts_slot == self_.slot) {
                layout(out, per.send_counts, per.send_offsets);
                layout(in, per.recv_counts, per.recv_offsets);
            }
            break;
        }
        case OpKind::Barrier: break;
    }
    if (!per.send_counts.empty() || !per.recv_counts.empty()) d.layout = std::make_shared<const PerRank>(std::move(per));
    if (call.send != nullptr) d.send = call.send->data(), call.sent = hash64(*call.send);
    if (call.recv != nullptr) d.recv = call.recv->data();
    if (call.in_place) d.recv = call.send->data() + static_cast<std::uint64_t>(me) * d.count * item;
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
    const auto failed = RankSet::of(self_.node->comm_failed(h.id));
    RankSet missing = RankSet::first(static_cast<int>(h.members.size())) - failed - RankSet::of(any_.got);
    auto call = make(Call::Recv, index, step.comm);
    missing.remove(call->rank);
    if (missing.empty()) {
        any_.over = true;
        return;
    }
    call->recv = memory(step.count);
    auto& c = *call;
    const int source = world_.random().chance(0.5) ? kAny : kAnyOrFail;
    RequestPtr request;
    world_.input(self_,
                 [&](Node& node, Time now) { request = node.recv(now, c.comm, c.recv->data(), c.recv->size(), source, index); });
    add(std::move(call), request);
}

}  // namespace ftcomm::sim
