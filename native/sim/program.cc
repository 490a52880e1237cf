#include "sim/program.h"

#include <algorithm>
#include <utility>

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
        case Call::Resume: return "resume";
        case Call::Commit: return "commit_checkpoint";
    }
    return "?";
}

std::string describe(const OpenCall& call) {
    std::string name = call.call == Call::Collective ? to_string(call.desc.kind) : to_string(call.call);
    return name + " at step " + std::to_string(call.step) + " of communicator " + std::to_string(call.comm);
}

bool Program::used_again(const std::byte* address) const {
    const auto is_in = [&](const Bytes* b) { return b != nullptr && holds(*b, address); };
    for (const auto& call : calls_)
        if (is_in(call->send) || is_in(call->recv)) return call->request != nullptr && call->request->done.load();
    return false;
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
    if (world_.scenario().replay && call.call == Call::Recv && call.peer < 0 && call.request->status.ok())
        heard_[call.step][static_cast<std::size_t>(call.number)] = call.request->source;
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

void Program::run() {
    const auto& s = world_.scenario();
    while (self_.running()) {
        switch (phase_) {
            case Phase::Begin: {
                create_comms(0);
                if (!self_.running()) return;
                if (self_.incarnation == 0 || s.replay) {
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
                    world_.leaves(self_);
                    RequestPtr request;
                    auto call = make(Call::Leave, -1, -1);
                    world_.input(self_, [&](Node& node, Time now) { request = node.leave(now); });
                    add(std::move(call), request);
                    phase_ = Phase::Leaving;
                    break;
                }
                if (group_ == s.resume_group && !resumed_) {
                    create_comms(group_);
                    if (!self_.running()) return;
                    resumed_ = true;
                    post_resume();
                    phase_ = Phase::Resume;
                    break;
                }
                if (!post_group()) return;
                phase_ = Phase::Wait;
                break;
            }
            case Phase::Resume:
                if (!wait_done()) return;
                if (!stop_ && std::exchange(goes_back_, false)) {
                    world_.counters().add("inject resume further back");
                    post_resume();
                    break;
                }
                if (stop_) after_group();
                else resumed();
                if (phase_ == Phase::Finished) return;
                phase_ = Phase::Post;
                break;
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
                self_.left = !stop_;
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

std::string Program::where() const {
    static const char* const phases[] = {"begin", "joining", "resume", "post", "wait", "recover", "leaving", "finished"};
    std::string out = std::string(phases[static_cast<int>(phase_)]) + " in group " + std::to_string(group_) + ":";
    for (const auto* c : open_)
        if (!c->request->done.load())
            out += std::string(" ") + (c->call == Call::Collective ? to_string(c->desc.kind) : to_string(c->call)) + " step " +
                   std::to_string(c->step) + " comm " + std::to_string(c->comm) + ";";
    return out;
}

}  // namespace ftcomm::sim
