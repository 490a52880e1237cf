#include "sim/sim_transport.h"

#include "sim/world.h"

namespace ftcomm::sim {

SimTransport::Target& SimTransport::target(int slot) {
    if (targets_.empty()) {
        targets_.resize(static_cast<std::size_t>(world_.scenario().ranks));
        for (int s = 0; s < world_.scenario().ranks; ++s)
            targets_[static_cast<std::size_t>(s)].incarnation = self_.known_incarnations[static_cast<std::size_t>(s)];
    }
    return targets_[static_cast<std::size_t>(slot)];
}

std::byte* SimTransport::reserve(int slot, std::uint32_t length) {
    FT_CHECK(slot >= 0 && slot < world_.scenario().ranks && slot != self_.slot, "reserve for slot %d", slot);
    FT_CHECK(length <= kMaxFramePayload && length <= max_payload(), "frame of %u bytes, the link carries %u", length,
             max_payload());
    Target& t = target(slot);
    if (t.reserved != nullptr) {  // given up without a commit
        world_.links().give(t.reserved);
        t.reserved = nullptr;
    }
    if (t.detached) {  // real links are not there yet, or no more; whatever waits for them keeps back what comes later
        world_.violate("M9", "slot %d.%u sends to slot %d, which is nobody now", self_.slot, self_.incarnation, slot);
        return nullptr;
    }
    if (t.link == nullptr) t.link = world_.links().find_or_make(self_, slot, t.incarnation);
    if (!world_.links().admits(*t.link, length)) return nullptr;
    t.reserved = world_.links().take(length);
    return t.reserved->data.get();
}

void SimTransport::commit(int slot, const FrameHeader& header) {
    Target& t = target(slot);
    FT_CHECK(t.reserved != nullptr, "commit to slot %d without reserve", slot);
    Frame* frame = t.reserved;
    t.reserved = nullptr;
    FT_CHECK(header.length <= frame->capacity, "commit of %u bytes, reserved %u", header.length, frame->capacity);
    frame->header = header;
    if (t.detached || !world_.may_send(self_)) {  // voted out, or the sender is dead from here on
        world_.links().give(frame);
        return;
    }
    world_.trace().frame(world_.now(), "send", self_.slot, self_.incarnation, slot, t.incarnation, header);
    world_.links().send(*t.link, frame, self_.hold_until);
}

bool SimTransport::send_from(int slot, const FrameHeader& header, const Held& payload) {
    const auto& bytes = payload.bytes;
    FT_CHECK(bytes.size() == header.length && bytes.size() % kWholeBytes == 0, "%zu bytes of a frame of %u", bytes.size(),
             header.length);
    auto* room = reserve(slot, header.length);
    if (room == nullptr) return false;
    std::memcpy(room, bytes.data(), bytes.size());
    if (payload.by == nullptr) target(slot).reserved->lent = bytes.data();
    commit(slot, header);
    world_.counters().add(payload.by != nullptr ? "sent from where it lies" : "lent");
    return true;
}

void SimTransport::take_back(int slot, std::uint64_t comm, bool has_come) {
    world_.links().take_back(self_, slot, comm, has_come);
}

void SimTransport::attach(int slot, std::uint32_t incarnation) {
    if (slot == self_.slot) return;
    Target& t = target(slot);
    if (t.reserved != nullptr) world_.links().give(t.reserved);
    t = Target{};
    t.incarnation = incarnation;
}

void SimTransport::detach(int slot) {
    if (slot == self_.slot) return;
    const auto* peer = world_.find(slot, target(slot).incarnation);
    if (peer != nullptr && peer->crashed && world_.same_host(self_.slot, slot)) world_.discard_windows(peer->id);
    target(slot).detached = true;
}

void SimTransport::drain(int slot) {
    if (Instance* from = world_.find(slot, target(slot).incarnation)) world_.links().drain(*from, self_, true);
}

bool SimTransport::shares_memory(int slot) {
    return world_.scenario().peer_memory && world_.same_host(self_.slot, slot) && !target(slot).detached;
}

bool SimTransport::is_near(int slot) { return world_.same_host(self_.slot, slot) && !target(slot).detached; }

// A buffer whose request is done belongs to its caller, who has put something else there by now.
Transport::Read SimTransport::read(int slot, const Remote& remote, std::byte* to, std::size_t bytes) {
    Instance* from = world_.find(slot, target(slot).incarnation);
    if (from == nullptr || !from->running() || !remote.is_of(from->incarnation) || !world_.may_read(self_)) return Read::Over;
    if (world_.scenario().unreadable == slot) {
        world_.counters().add("read.refused");
        return Read::Refused;
    }
    const auto* data = reinterpret_cast<const std::byte*>(static_cast<std::uintptr_t>(remote.from));      // NOLINT
    const auto* shown = world_.window_at(from->id, remote.ticket_at);
    FT_CHECK(shown != nullptr, "slot %d shows without a ticket", slot);
    std::uint64_t ticket = 0;
    std::memcpy(&ticket, shown->memory.get() + World::offset_of(remote.ticket_at), sizeof ticket);
    if (from->program->used_again(data)) std::memset(to, 0xee, bytes);
    else std::memcpy(to, data, bytes);
    if (ticket == remote.ticket) return Read::Done;
    world_.counters().add("read.over");
    return Read::Over;
}

// Of the host: they outlive whoever made them.
Transport::Window SimTransport::make_window(std::size_t bytes, Room room) {
    if (room == Room::Any && world_.scenario().windowless == self_.slot && windows_++ >= world_.scenario().room) {
        world_.counters().add("window.refused");
        return {};
    }
    auto& all = world_.windows();
    all.push_back({self_.id, bytes, std::make_unique_for_overwrite<std::byte[]>(bytes)});
    std::memset(all.back().memory.get(), 0, bytes <= kSmallWindow ? bytes : 64);  // of more nothing is read before it is written
    return {all.back().memory.get(), World::place_of(all.size())};
}

const std::byte* SimTransport::look(int slot, std::uint64_t place, std::size_t bytes) {
    const Instance* peer = world_.find(slot, target(slot).incarnation);
    if (peer == nullptr || target(slot).detached) return nullptr;
    const auto* window = world_.window_at(peer->id, place);
    if (window == nullptr) return nullptr;
    FT_CHECK(window->bytes == bytes, "slot %d shows a window of %zu bytes, not of %zu", slot, window->bytes, bytes);
    return window->memory.get();
}

void SimTransport::watch_words(std::span<const Word> words) {
    words_.assign(words.begin(), words.end());
    asleep_ = world_.sleeps();
    if (has_news()) world_.look_soon(self_);  // it has come before it slept
}

bool SimTransport::has_news() const { return !asleep_ && std::ranges::any_of(words_, &Word::has_changed); }

void SimTransport::nudge(int slot) {
    Instance* to = world_.find(slot, target(slot).incarnation);
    if (target(slot).detached || !world_.may_send(self_)) return;
    if (to != nullptr && to->running()) world_.look_soon(*to);
}

std::uint32_t SimTransport::max_payload() const { return world_.scenario().network.max_payload; }

Link* Links::find_or_make(const Instance& from, int to_slot, std::uint32_t to_incarnation) {
    for (auto& l : links_)
        if (l->from == from.id && l->to_slot == to_slot && l->to_incarnation == to_incarnation) return l.get();
    auto link = std::make_unique<Link>();
    link->id = static_cast<int>(links_.size());
    link->from = from.id;
    link->to_slot = to_slot;
    link->to_incarnation = to_incarnation;
    links_.push_back(std::move(link));
    return links_.back().get();
}

bool Links::admits(Link& link, std::uint32_t length) {
    const auto& net = world_.scenario().network;
    const bool full = !link.frames.empty() &&
                      (static_cast<int>(link.frames.size()) >= net.frames || link.bytes + length > 2ull * net.max_payload);
    if (full) {
        link.writer_waits = true;
        return false;
    }
    if (net.refuse > 0 && random_.chance(net.refuse)) {
        link.writer_waits = true;
        if (!link.writable_scheduled) {
            link.writable_scheduled = true;
            world_.queue().push(world_.now() + random_.between(0, 200 * kUs), EventKind::Writable, link.id);
        }
        return false;
    }
    return true;
}

Frame* Links::take(std::uint32_t length) {
    Frame* frame = nullptr;
    if (!free_.empty()) {
        frame = free_.back();
        free_.pop_back();
    } else {
        all_.push_back(std::make_unique<Frame>());
        frame = all_.back().get();
    }
    if (frame->capacity < length || frame->data == nullptr) {
        const std::uint32_t room = std::max<std::uint32_t>(256, length);
        frame->data = std::make_unique_for_overwrite<std::byte[]>(room);
        frame->capacity = room;
    }
    frame->place = nullptr;
    frame->lent = nullptr;
    // What the node does not write must not depend on an earlier use of the memory.
    std::memset(frame->data.get(), 0xcd, std::min<std::uint32_t>(length, 256));
    return frame;
}

Time Links::delay() {
    const auto& net = world_.scenario().network;
    if (net.spike > 0 && random_.chance(net.spike)) return random_.between(net.latency_low, net.spike_high);
    return random_.between(net.latency_low, net.latency_high);
}

void Links::send(Link& link, Frame* frame, Time not_before) {
    const auto& net = world_.scenario().network;
    const bool slow = net.slow_by > 0 && world_.instance(link.from).slot == net.slow_from && link.to_slot == net.slow_to;
    const Time more = slow ? random_.between(0, net.slow_by) : 0;
    frame->at = std::max({link.last_at, world_.now() + delay() + more, not_before});
    link.last_at = frame->at;
    link.bytes += frame->header.length;
    link.frames.push_back(frame);
    if (!link.scheduled) schedule(link, frame->at);
}

void Links::schedule(Link& link, Time at) {
    link.scheduled = true;
    world_.queue().push(at, EventKind::Deliver, link.id);
}

void Links::after_removal(Link& link) {
    if (link.writer_waits && !link.writable_scheduled) {
        link.writable_scheduled = true;
        world_.queue().push(world_.now() + random_.between(0, 20 * kUs), EventKind::Writable, link.id);
    }
}

void Links::deliver(int id) {
    Link& link = *links_[static_cast<std::size_t>(id)];
    link.scheduled = false;
    if (link.frames.empty()) return;
    if (link.frames.front()->at > world_.now()) {
        schedule(link, link.frames.front()->at);
        return;
    }
    Instance* to = world_.find(link.to_slot, link.to_incarnation);
    if (to == nullptr) return;  // not started yet: instance_started() goes on
    if (!to->running()) return;  // dead: its link fills up until it is detached
    const Time earliest = std::max(cut_until(world_.instance(link.from).slot, link.to_slot), to->stopped_until);
    if (earliest > world_.now()) {
        schedule(link, earliest + random_.between(0, 50 * kUs));
        return;
    }
    Frame* frame = link.frames.front();
    // Half of it, and the rest later, whatever has become of its place.
    if (frame->place == nullptr && frame->header.length > 0 &&
        (frame->place = world_.place(link.from, *to, frame->header)) != nullptr) {
        std::memcpy(frame->place, frame->data.get(), frame->header.length / 2);
        schedule(link, world_.now() + (frame->header.seq % 2 == 0 ? delay() : 0));
        return;
    }
    look_at_lent(link, *frame);
    link.frames.pop_front();
    link.bytes -= frame->header.length;
    if (!link.frames.empty()) schedule(link, std::max(world_.now(), link.frames.front()->at));
    after_removal(link);
    world_.deliver(link.from, *to, *frame);
    give(frame);
}

// Sent as late as can be: it must lie there as it lay when it was lent. What is sent again may lie there otherwise, as it is not looked at; that it
// is still lent then, Checker::completed sees to.
void Links::look_at_lent(Link& link, const Frame& frame) {
    const auto& from = world_.instance(link.from);
    if (frame.lent == nullptr || !from.running()) return;
    if (from.program->used_again(frame.lent) || std::memcmp(frame.lent, frame.data.get(), frame.header.length) != 0)
        world_.violate("B", "slot %d.%u sends from memory that is its caller's again", from.slot, from.incarnation);
    link.unacknowledged.push_back({frame.lent, frame.header.comm});
}

bool Links::has_lent(const Instance& from, const Bytes& memory) const {
    for (const auto& l : links_) {
        if (l->from != from.id) continue;
        for (const auto* frame : l->frames)
            if (holds(memory, frame->lent)) return true;
        for (const auto& lent : l->unacknowledged)
            if (holds(memory, lent.at)) return true;
    }
    return false;
}

void Links::take_back(const Instance& from, int to_slot, std::uint64_t comm, bool has_come) {
    for (auto& l : links_) {
        if (l->from != from.id || l->to_slot != to_slot) continue;
        std::erase_if(l->unacknowledged, [&](const auto& lent) { return lent.comm == comm; });
        for (auto* frame : l->frames) {
            if (frame->lent == nullptr || frame->header.comm != comm) continue;
            if (has_come)
                world_.violate("B", "slot %d.%u is through with an operation of which slot %d lacks a frame", from.slot,
                               from.incarnation, to_slot);
            frame->lent = nullptr;
            world_.counters().add("taken back");
        }
    }
}

void Links::writable(int id) {
    Link& link = *links_[static_cast<std::size_t>(id)];
    Instance& from = world_.instance(link.from);
    if (!from.running()) return;
    if (from.stopped_until > world_.now()) {
        world_.queue().push(from.stopped_until + random_.between(0, 50 * kUs), EventKind::Writable, id);
        return;
    }
    link.writable_scheduled = false;
    link.writer_waits = false;
    const int slot = link.to_slot;
    world_.input(from, [slot](Node& node, Time now) { node.on_writable(now, slot); });
}

Time& Links::cut_until(int from_slot, int to_slot) {
    const auto n = static_cast<std::size_t>(world_.scenario().ranks);
    if (cuts_.empty()) cuts_.resize(n * n, 0);
    return cuts_[static_cast<std::size_t>(from_slot) * n + static_cast<std::size_t>(to_slot)];
}

void Links::cut(int from_slot, int to_slot, Time until) {
    if (from_slot == to_slot) return;
    Time& t = cut_until(from_slot, to_slot);
    t = std::max(t, until);
}

void Links::heal_all() {
    std::fill(cuts_.begin(), cuts_.end(), 0);
    for (auto& l : links_)
        if (!l->frames.empty()) schedule(*l, world_.now());  // an extra event of a link is harmless
}

void Links::instance_started(const Instance& to) {
    for (auto& l : links_)
        if (l->to_slot == to.slot && l->to_incarnation == to.incarnation && !l->frames.empty() && !l->scheduled)
            schedule(*l, world_.now());
}

void Links::drop_tails(const Instance& from) {
    for (auto& l : links_) {
        if (l->from != from.id || l->frames.empty()) continue;
        const auto keep = random_.below(l->frames.size() + 1);
        while (l->frames.size() > keep) {
            l->bytes -= l->frames.back()->header.length;
            give(l->frames.back());
            l->frames.pop_back();
        }
    }
}

Link* Links::existing(const Instance& from, const Instance& to) {
    for (auto& l : links_)
        if (l->from == from.id && l->to_slot == to.slot && l->to_incarnation == to.incarnation) return l.get();
    return nullptr;
}

bool Links::clear(const Instance& from, const Instance& to) {
    if (cut_until(from.slot, to.slot) > world_.now()) return false;
    const Link* l = existing(from, to);
    return l == nullptr || l->frames.empty() || l->frames.front()->at <= world_.now();
}

void Links::drain(const Instance& from, Instance& to, bool nested) {
    Link* link = existing(from, to);
    if (link == nullptr || cut_until(from.slot, to.slot) > world_.now()) return;
    const bool shared = world_.same_host(from.slot, to.slot);
    while (!link->frames.empty() && to.running() && (shared || link->frames.front()->at <= world_.now())) {
        Frame* frame = link->frames.front();
        look_at_lent(*link, *frame);
        link->frames.pop_front();
        link->bytes -= frame->header.length;
        world_.deliver(from.id, to, *frame, nested);
        give(frame);
    }
}

}  // namespace ftcomm::sim
