// The launcher of a job with the policy replay: each rank that is gone is started again; when nobody is left, all are.
#include <algorithm>

#include "membership/view.h"
#include "sim/world.h"

namespace ftcomm::sim {

bool World::is_member(const Instance& who) {
    const auto view = JobView::decode(store_.cell(Node::view_key(job())));
    return view.has_value() && view->is_alive(who.slot, who.incarnation);
}

bool World::is_last(const Instance& who) {
    if (!scenario_.replay) return running_count() < 2;
    if (somebody_left()) return true;  // all have come to the end of their programs: a death now is no failure of the job
    return (!scenario_.may_lose_all || safety_over_) && is_member(who) && running_count() < 2;
}

bool World::somebody_left() {
    return std::any_of(instances_.begin(), instances_.end(), [](const auto& i) { return i->left; });
}

void World::replace(int slot, std::uint32_t incarnation) {
    Instance* old = newest(slot);
    if (old->incarnation != incarnation || somebody_left()) return;
    if (old->running()) {  // M9: voted out, perhaps stopped. Nothing of it runs beside its replacement, which writes the same log
        counters_.add("inject kill of a voted-out rank");
        died(*old);
    }
    Instance& fresh = start(slot, incarnation + 1);
    counters_.add("inject replacement");
    trace_.text(now(), "%d.%u starts", fresh.slot, fresh.incarnation);
}

void World::look_for_survivors() {
    if (!scenario_.replay || running_count() > 0 || all_done()) return;
    queue_.push(now() + random_.between(10 * kMs, 3 * kHeartbeat), EventKind::Generation, generation_);
}

// Nobody is left who could let a replacement in: all start again, in a view of their own, with the same logs.
void World::start_again(int generation) {
    if (generation != generation_ || running_count() > 0 || all_done()) return;
    ++generation_;
    counters_.add("inject new generation");
    trace_.text(now(), "generation %d starts", generation_);
    std::vector<std::uint32_t> incarnations;
    for (int slot = 0; slot < scenario_.ranks; ++slot) {
        Instance* old = newest(slot);
        if (old->running()) {
            old->crashed = true;
            killed(*old);
        }
        incarnations.push_back(old->incarnation + 1);
    }
    checker_.new_generation();
    initial_view_ = Node::make_initial_view(job(), store_.boot, incarnations, {}, scenario_.log_groups, scenario_.crowded);
    store_.create(Node::view_key(job()), initial_view_);
    for (int slot = 0; slot < scenario_.ranks; ++slot) start(slot, incarnations[static_cast<std::size_t>(slot)]);
    progress();
}

}  // namespace ftcomm::sim
