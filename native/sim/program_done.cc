// What a rank does with what has completed: hears a fan-in, shrinks a broken communicator, takes its place after a join.
#include "sim/program.h"

#include <algorithm>

#include "sim/world.h"

namespace ftcomm::sim {

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
        // One that the survivors have made or shrunk meanwhile, with this slot in it.
        if (is_in(h, self_.slot) && !h.gone && h.created && self_.node->comm_size(h.id) == 0) create(static_cast<int>(c));
        if (!self_.running()) return;
    }
    group_ = static_cast<int>(std::upper_bound(s.groups.begin(), s.groups.end(), step) - s.groups.begin()) - 1;
    next_step_ = step + 1;  // what the survivors have posted behind the admission waits for this rank
    phase_ = Phase::Post;
}

void Program::somebody_is_gone() {
    if (!any_.over) world_.wake_program(self_, 0);
}

// A receive from anyone, when all who have not been heard are gone: cancelled, or it would wait for ever for those who have been heard.
bool Program::stop_waiting_for_anyone(OpenCall& call) {
    RankSet missing = RankSet::first(static_cast<int>(call.members.size())) - RankSet::of(self_.node->comm_failed(call.comm)) -
                      RankSet::of(any_.got);
    missing.remove(call.rank);
    if (!missing.empty()) return false;
    const auto request = call.request;
    world_.input(self_, [&](Node& node, Time now) { node.fail_request(now, request, Code::Cancelled); });
    return request->done.load();
}

// Newcomers know nothing of what failed before the admission in this group. If the communicator is broken, the next call on it shows
// that to them, too.
bool Program::before_admit(int step) const {
    const auto& s = world_.scenario();
    for (int i = step + 1; i < s.groups[static_cast<std::size_t>(group_) + 1]; ++i)
        if (s.steps[static_cast<std::size_t>(i)].kind == StepKind::Admit) return true;
    return false;
}

bool Program::wait_done() {
    for (std::size_t i = 0; i < open_.size() && self_.running();) {
        OpenCall& call = *open_[i];
        if (!call.request->done.load()) {
            if (call.request->alarmed) {  // ULFM: acknowledge, then the receive goes on
                self_.node->ack_failed(call.comm, -1);
                world_.counters().add("program: alarm acknowledged");
            }
            if (call.call == Call::Recv && call.peer < 0 && !world_.scenario().replay && stop_waiting_for_anyone(call)) continue;
            ++i;
            continue;
        }
        open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
        i = 0;
        const Code code = call.request->status.code;
        if (world_.scenario().replay) {
            ends_replay(call);
            continue;
        }
        if (code == Code::StaleEpoch || code == Code::NoAuthority) {
            stop_ = true;
            any_.over = true;
            continue;
        }
        const auto& s = world_.scenario();
        switch (call.call) {
            case Call::Collective: {
                const auto kind = s.steps[static_cast<std::size_t>(call.step)].op;
                const bool lossy = s.comms[static_cast<std::size_t>(call.comm_index)].policy == Policy::Lossy;
                const bool quit = s.steps[static_cast<std::size_t>(call.step)].quitting_slot >= 0;  // then all shrink
                const bool goes_on = lossy && !quit && (code == Code::PeerFailure || code == Code::Mismatch);
                if (code != Code::Ok && is_uniform(kind) && !goes_on && !before_admit(call.step) &&
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
                        if (other.get() != &self_ && other->running() && self_.view.has(other->slot) &&
                            self_.node->incarnation_of(other->slot) == other->incarnation && !other->program->joining())
                            visit(*other->program);
                };
                if (step < 0)  // nobody has returned from it yet: then all are still in it
                    peers([&](Program& p) {
                        if (p.admit_step() >= 0 && (step < 0 || p.admit_step() < step)) step = p.admit_step();
                    });
                std::vector<const Program*> like;
                peers([&](Program& p) {
                    if (step >= 0 && p.next_step_ > step) like.push_back(&p);
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
    if (world_.scenario().replay) end_of_replay_group();
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
    note();
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

}  // namespace ftcomm::sim
