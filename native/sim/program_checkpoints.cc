// What a rank's user does about checkpoints: saves its state and commits it; after a restart loads the newest, or the one before when the newest
// is damaged, and goes on from there.
#include "sim/data.h"
#include "sim/program.h"
#include "sim/world.h"

namespace ftcomm::sim {

void Program::post_resume() {
    auto call = make(Call::Resume, -1, 0);
    const auto& c = *call;
    auto tags = self_.node->comm_checkpoints(c.comm);
    if (!tags.empty() && world_.may_damage(self_.slot) && world_.random().chance(0.3)) {
        world_.counters().add("inject damaged checkpoint");
        world_.damaged(self_.slot);
        tags.erase(tags.begin());
    }
    tag_ = tags.empty() ? "" : tags.front();  // before the first one is the start
    const auto notes = self_.node->comm_notes(c.comm);
    const bool noted = !notes.empty() && world_.random().chance(0.6);
    if (noted) tag_ = world_.random().chance(0.7) ? notes.front() : notes[world_.random().below(notes.size())];
    world_.trace().text(world_.now(), "%d.%u resumes from \"%s\"", self_.slot, self_.incarnation, tag_.c_str());
    RequestPtr request;
    world_.input(self_, [&](Node& node, Time now) {
        request = noted ? node.comm_resume_noted(now, c.comm, tag_) : node.comm_resume(now, c.comm, tag_);
    });
    add(std::move(call), request);
}

void Program::resumed() {
    if (tag_.empty()) return;
    const Saved* saved = world_.saved(self_.slot, tag_);
    if (saved == nullptr) {
        world_.violate("X", "slot %d goes on from checkpoint %s, which it has not saved", self_.slot, tag_.c_str());
        return;
    }
    world_.counters().add(tag_.starts_with("note") ? "inject resume from a note" : "inject resume from a checkpoint");
    state_ = saved->state;
    heard_ = saved->heard;
    group_ = saved->group;
    next_step_ = world_.scenario().groups[static_cast<std::size_t>(group_)];
}

void Program::post_commit(int index) {
    const auto tag = std::to_string(index);
    world_.save(self_.slot, tag, {state_, heard_, group_ + 1});
    auto call = make(Call::Commit, index, 0);
    const auto& c = *call;
    RequestPtr request;
    world_.trace().text(world_.now(), "%d.%u commits checkpoint %s", self_.slot, self_.incarnation, tag.c_str());
    world_.input(self_, [&](Node& node, Time now) { request = node.comm_commit(now, c.comm, tag); });
    add(std::move(call), request);
}

// Between two groups, where nothing of its own is open. Others may not have received yet what it has sent.
void Program::note() {
    const auto& s = world_.scenario();
    if (!s.notes || !s.log_groups.empty() || !resumed_ ||
        mixed(s.seed, static_cast<std::uint64_t>(self_.slot * 1000 + group_)) % 3 == 0)
        return;
    const auto tag = "note " + std::to_string(group_);
    world_.save(self_.slot, tag, {state_, heard_, group_});
    Status status;
    world_.input(self_, [&](Node& node, Time now) { status = node.comm_note(now, handles_[0].id, tag); });
    if (self_.running() && status.ok() && self_.node->stale())  // its operations ended without being over
        world_.violate("X", "slot %d: %s: noted, though voted out", self_.slot, tag.c_str());
    const bool voted_out = status.code == Code::StaleEpoch || status.code == Code::NoAuthority;  // its next call will tell it
    if (self_.running() && !status.ok() && !voted_out)
        world_.violate("X", "slot %d: %s: refused: %s", self_.slot, tag.c_str(), status.message.c_str());
}

}  // namespace ftcomm::sim
