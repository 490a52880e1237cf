#include "sim/sim_authority.h"

#include "sim/world.h"

namespace ftcomm::sim {

void SimAuthority::read(const std::string& key, std::uint64_t request) {
    if (world_.may_ask(self_)) world_.store().ask(self_, true, key, {}, {}, request);
}

void SimAuthority::compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) {
    if (world_.may_ask(self_)) world_.store().ask(self_, false, key, expected, desired, request);
}

Time Store::delay() {
    const auto& net = world_.scenario().network;
    Time d = random_.between(net.cell_low, net.cell_high);
    if (world_.now() < slow_until) d += random_.between(0, slow_by);
    return d;
}

void Store::ask(Instance& who, bool is_read, const std::string& key, const Bytes& expected, const Bytes& desired,
                std::uint64_t request) {
    Operation op;
    op.who = who.id;
    op.is_read = is_read;
    op.key = key;
    op.expected = expected;
    op.desired = desired;
    op.reply.request = request;
    operations_.push_back(std::move(op));
    const Time from = std::max(world_.now(), who.hold_until);  // stopped in mid-burst: it goes out when the rank wakes
    world_.queue().push(from + delay(), EventKind::CellRequest, static_cast<int>(operations_.size()) - 1);
}

void Store::reached(int index) {
    Operation& op = operations_[static_cast<std::size_t>(index)];
    auto& reply = op.reply;
    reply.boot = boot;
    const char* what = "lost";
    if (lost) {
        reply.result = CellResult::Lost;
    } else if (op.is_read) {
        reply.result = CellResult::Value;
        reply.value = cells_[op.key];
        what = "read";
    } else {
        const bool unknown = unknown_next > 0;
        if (unknown) --unknown_next;
        Bytes& cell = cells_[op.key];
        const bool matches = cell == op.expected;
        if (unknown && random_.chance(0.5)) {  // the request never arrived
            reply.result = CellResult::Unknown;
            what = "unknown, not done";
        } else {
            if (matches) cell = op.desired;
            reply.result = matches ? CellResult::Swapped : CellResult::Conflict;
            what = matches ? "swapped" : "conflict";
            if (!matches) reply.value = cell;
            if (unknown) {
                reply.result = CellResult::Unknown;
                reply.value.clear();
                what = matches ? "unknown, done" : "unknown, conflict";
            }
        }
        world_.counters().add(unknown ? "inject authority unknown outcome" : matches ? "authority swap" : "authority conflict");
    }
    const Instance& who = world_.instance(op.who);
    world_.trace().text(world_.now(), "store: %s of %s by %d.%u", what, op.key.c_str(), who.slot, who.incarnation);
    world_.queue().push(world_.now() + delay(), EventKind::CellReply, index);
}

void Store::answered(int index) {
    Operation& op = operations_[static_cast<std::size_t>(index)];
    Instance& who = world_.instance(op.who);
    if (!who.running()) return;
    if (who.stopped_until > world_.now()) {
        world_.queue().push(who.stopped_until + random_.between(0, 50 * kUs), EventKind::CellReply, index);
        return;
    }
    CellReply reply = std::move(op.reply);
    world_.input(who, [&reply](Node& node, Time now) { node.on_cell(now, std::move(reply)); });
}

}  // namespace ftcomm::sim
