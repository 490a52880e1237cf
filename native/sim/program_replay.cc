// What a rank's user does under the policy replay: the same script, from the top in each incarnation, with inputs that follow from the
// step and from all that it has received before, and from nothing else.
#include <algorithm>

#include "sim/data.h"
#include "sim/program.h"
#include "sim/world.h"

namespace ftcomm::sim {

namespace {
// Two streams of tags between a pair: a later message may be received before an earlier one of the other stream.
std::int64_t tag_of(int step, int number) { return static_cast<std::int64_t>(step) * 2 + number % 2; }

// Inside a log group a large send ends with its receive: what is received in a later group of steps must not be waited for now. And
// of two receives the later one may be done first: the checker tells by their order which of a source's messages went to anyone.
std::uint64_t bytes_of(const Scenario& s, int of, int from, int to, int number) {
    const auto bytes = message_bytes(of, from, to, number);
    const auto kind = s.steps[static_cast<std::size_t>(of)].kind;
    const bool small = !s.log_groups.empty() && (kind == StepKind::WebSend || kind == StepKind::FanIn);
    return small ? std::min(bytes, s.eager_limit) : bytes;
}
}  // namespace

void Program::post_messages(int index) {
    const Step& step = world_.scenario().steps[static_cast<std::size_t>(index)];
    const auto& members = handles_[static_cast<std::size_t>(step.comm)].members;
    const int size = static_cast<int>(members.size());
    const int of = step.of >= 0 ? step.of : index;
    const auto me = static_cast<int>(std::find(members.begin(), members.end(), self_.slot) - members.begin());
    if (step.kind != StepKind::WebReceive)
        for (int to = 0; to < size; ++to)
            for (int n = 0; n < message_count(step, of, me, to) && self_.running(); ++n) post_send(index, of, to, n, state_);
    if (step.kind == StepKind::WebSend) return;
    for (int odd = 1; odd >= 0; --odd)
        for (int from = 0; from < size; ++from)
            for (int n = odd; n < message_count(step, of, from, me) && self_.running(); n += 2) post_receive(index, of, from, n);
}

void Program::post_send(int index, int of, int peer, int number, std::uint64_t state) {
    auto call = make(Call::Send, index, world_.scenario().steps[static_cast<std::size_t>(index)].comm);
    auto& c = *call;
    c.peer = peer;
    c.number = number;
    c.send = memory(bytes_of(world_.scenario(), of, c.rank, peer, number));
    fill_rough(DType::UInt8,
               mixed(mixed(state, static_cast<std::uint64_t>(index)), static_cast<std::uint64_t>(peer * 8 + number)),
               c.send->size(), c.send->data());
    world_.checker().sends(self_, c, of);
    RequestPtr request;
    const auto tag = tag_of(of, number);
    world_.input(self_,
                 [&](Node& node, Time now) { request = node.send(now, c.comm, c.send->data(), c.send->size(), peer, tag); });
    add(std::move(call), request);
}

void Program::post_receive(int index, int of, int peer, int number) {
    auto call = make(Call::Recv, index, world_.scenario().steps[static_cast<std::size_t>(index)].comm);
    auto& c = *call;
    c.peer = peer;
    c.number = number;
    c.recv = memory(bytes_of(world_.scenario(), of, peer, c.rank, number));
    RequestPtr request;
    const auto tag = tag_of(of, number);
    world_.input(self_,
                 [&](Node& node, Time now) { request = node.recv(now, c.comm, c.recv->data(), c.recv->size(), peer, tag); });
    add(std::move(call), request);
}

// All receives from anyone are posted at once; the longest message fits each.
void Program::post_fan_in(int index) {
    const Step& step = world_.scenario().steps[static_cast<std::size_t>(index)];
    const auto& members = handles_[static_cast<std::size_t>(step.comm)].members;
    const int size = static_cast<int>(members.size()), root = step.root % size;
    const auto me = static_cast<int>(std::find(members.begin(), members.end(), self_.slot) - members.begin());
    for (int n = 0; n < message_count(step, index, me, root) && self_.running(); ++n)
        post_send(index, index, root, 2 * n, state_);
    if (me != root) return;
    int expected = 0;
    for (int from = 0; from < size; ++from) expected += message_count(step, index, from, root);
    auto& heard = heard_[index];
    heard.assign(static_cast<std::size_t>(expected), -1);
    for (int n = 0; n < expected && self_.running(); ++n) {
        auto call = make(Call::Recv, index, step.comm);
        auto& c = *call;
        c.number = n;
        c.recv = memory(9000);
        RequestPtr request;
        world_.input(self_, [&](Node& node, Time now) {
            request = node.recv(now, c.comm, c.recv->data(), c.recv->size(), kAny, tag_of(index, 0));
        });
        add(std::move(call), request);
    }
}

void Program::post_answers(int index) {
    const Step& step = world_.scenario().steps[static_cast<std::size_t>(index)];
    const auto& members = handles_[static_cast<std::size_t>(step.comm)].members;
    const int size = static_cast<int>(members.size()), root = step.root % size;
    const auto me = static_cast<int>(std::find(members.begin(), members.end(), self_.slot) - members.begin());
    if (me != root) {
        post_receive(index, index, root, 0);
        return;
    }
    std::uint64_t order = 7;
    for (int source : heard_[step.of]) order = mixed(order, static_cast<std::uint64_t>(source));
    for (int to = 0; to < size && self_.running(); ++to)
        if (to != me) post_send(index, index, to, 0, order);
}

// Voted out, or nobody there to let it in: this process ends, and another one takes its place. Nothing else may go wrong.
bool Program::ends_replay(const OpenCall& call) {
    const auto& step = world_.scenario().steps[static_cast<std::size_t>(std::max(call.step, 0))];
    const Code code = call.request->status.code;
    if (call.call == Call::Commit && code == Code::Invalid) return false;  // refused: the program goes on
    if (call.call == Call::Resume && code == Code::Mismatch) {
        goes_back_ = true;
        return false;
    }
    if (code != Code::Ok) {
        stop_ = true;
        return true;
    }
    const bool by_time = call.call == Call::Recv && (step.kind == StepKind::FanIn || step.kind == StepKind::Answer);
    if (call.call == Call::Collective || (call.call == Call::Recv && !by_time))
        received_[{call.step, call.call == Call::Recv ? call.peer * 8 + call.number + 1 : 0}] = call.digest;
    return false;
}

void Program::end_of_replay_group() {
    for (const auto& [what, digest] : received_)
        state_ = mixed(mixed(state_, static_cast<std::uint64_t>(what.first * 1024 + what.second)), digest);
    received_.clear();
}

}  // namespace ftcomm::sim
