// Who is to go, and when: confirmed deaths at once, silence and resets only as complaints about a link (M6, M11, M12).
#include <algorithm>

#include "communicator/node_impl.h"

namespace ftcomm {

void NodeImpl::suspected(int slot, Evidence evidence, Time silence) {
    if (reported_.has(slot)) return;
    reported_.add(slot);
    NodeEvent e;
    e.kind = NodeEvent::Kind::Suspected;
    e.slot = slot;
    e.incarnation = core.view.members[static_cast<std::size_t>(slot)].incarnation;
    e.evidence = evidence;
    e.silence = silence;
    core.event(std::move(e));
}

void NodeImpl::on_heard(int slot, std::uint32_t incarnation) {
    if (!core.in_view(slot, incarnation)) return;
    heard_[static_cast<std::size_t>(slot)] = core.now;
    if (!reset_.empty()) reset_.erase(slot);
    reported_.remove(slot);
}

bool NodeImpl::same_host(int a, int b) const {
    const auto& hosts = core.config.hosts;
    return !hosts.empty() && hosts[static_cast<std::size_t>(a)] == hosts[static_cast<std::size_t>(b)];
}

// M12: a host is suspected as a whole, when nobody on it has been heard for a heartbeat, or one rank of it for that long.
RankSet NodeImpl::ripe_suspects(std::map<int, Evidence>* why) {
    RankSet silent;
    Time since = 0;
    const auto hb = core.config.heartbeat;
    // M11, between ticks: this rank has just woken up, and its next tick will say so.
    if (core.rules.m11 && core.now - last_tick_ > hb / 4) return silent;
    const auto living = core.view.alive() - core.left;
    for (int s : living.list()) {
        if (s == core.self() || confirmed_.count(s) > 0) continue;
        const auto quiet = core.now - heard_[static_cast<std::size_t>(s)];
        // What breaks one connection breaks others a moment later, and most are back at once: it must have been refused again.
        const auto reset = reset_.find(s);
        const bool was_reset = reset != reset_.end() && reset->second.last - reset->second.first >= hb / 50;
        if (quiet <= hb && !was_reset) continue;
        silent.add(s);
        since = std::max(since, was_reset ? quiet : quiet - hb);
        (*why)[s] = was_reset && quiet <= hb ? Evidence::Reset : Evidence::Heartbeat;
    }
    if (silent.empty()) return silent;
    if (core.rules.m12 && !core.config.hosts.empty()) {
        for (int s : silent.list()) {
            RankSet host;
            bool all_quiet = true;
            for (int o : living.list()) {
                if (!same_host(o, s)) continue;
                host.add(o);
                all_quiet &= o != core.self() && core.now - heard_[static_cast<std::size_t>(o)] > hb / 2;
            }
            if (!all_quiet) continue;
            for (int o : host.list()) {
                if (confirmed_.count(o) > 0) continue;
                silent.add(o);
                why->emplace(o, Evidence::Heartbeat);
            }
        }
    }
    // M11: whoever cannot reach many waits longer, so the larger side of a cut wins the cell. Silence and resets do not come from all
    // at the same instant: those who will be silent soon, or have not been heard since the reset, count among them.
    RankSet unreachable = silent;
    for (int s : living.list()) {
        if (s == core.self() || confirmed_.count(s) > 0) continue;
        const auto heard = heard_[static_cast<std::size_t>(s)];
        bool doubtful = core.now - heard > hb * 3 / 4;
        // Of its own host's ranks it hears in time, whatever happens to connections.
        for (const auto& [slot, reset] : reset_) doubtful |= heard <= reset.first && !same_host(s, core.self());
        if (doubtful) unreachable.add(s);
    }
    // One rank that all the others miss goes at once.
    const auto delay = core.rules.m11 ? hb * 3 / 10 * (unreachable.count() - 1) / std::max(1, living.count()) : Time{0};
    if (since < delay) return {};
    return silent;
}

std::map<int, Evidence> NodeImpl::removals_due() {
    std::map<int, Evidence> due;
    if (!core.gives_up) due[core.self()] = Evidence::GaveUp;
    for (const auto& [slot, evidence] : confirmed_) {
        if (!core.view.members[static_cast<std::size_t>(slot)].alive) continue;
        if (evidence != Evidence::Left) due[slot] = evidence;
    }
    for (int slot : (core.left & core.view.alive()).list()) {
        bool needed = admit_request_ != nullptr;
        for (const auto& [id, comm] : comms) needed |= comm->blocked_on(slot);
        if (needed) due[slot] = Evidence::Left;
    }
    std::map<int, Evidence> why;
    for (int slot : ripe_suspects(&why).list()) {
        suspected(slot, why[slot], core.now - heard_[static_cast<std::size_t>(slot)]);
        due.emplace(slot, why[slot]);
    }
    add_groups(&due);
    return due;
}

// G1: who dies takes its log group along, in the same compare-and-set. What the others of the group have said to it, and it to them, is in no
// log: they start again together. So of two members of a group that are in one view, each has known no other process of the other's slot,
// and nothing unlogged can come to a process that does not do again what it was said to.
void NodeImpl::add_groups(std::map<int, Evidence>* due) const {
    if (core.view.groups.empty() || !core.rules.g1) return;
    RankSet dead;
    for (const auto& [slot, evidence] : *due)
        if (evidence != Evidence::Left) dead.add(slot);
    for (int d : dead.list())
        for (int s : core.view.alive().list())
            if (core.view.same_group(d, s)) due->emplace(s, core.left.has(s) ? Evidence::Left : Evidence::Group);
}

}  // namespace ftcomm
