// What a rank's user does about checkpoints: saves its state and commits it; after a restart loads the newest, or the one before when the newest
// is damaged, and goes on from there.
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
    world_.trace().text(world_.now(), "%d.%u resumes from \"%s\"", self_.slot, self_.incarnation, tag_.c_str());
    RequestPtr request;
    world_.input(self_, [&](Node& node, Time now) { request = node.comm_resume(now, c.comm, tag_); });
    add(std::move(call), request);
}

void Program::resumed() {
    if (tag_.empty()) return;
    const Saved* saved = world_.saved(self_.slot, tag_);
    if (saved == nullptr) {
        world_.violate("X", "slot %d goes on from checkpoint %s, which it has not saved", self_.slot, tag_.c_str());
        return;
    }
    world_.counters().add("inject resume from a checkpoint");
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

}  // namespace ftcomm::sim
