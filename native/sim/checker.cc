#include "sim/checker.h"

#include <algorithm>
#include <cstring>

#include "sim/data.h"
#include "sim/world.h"

namespace ftcomm::sim {

namespace {

// What the user branches on: go on, or give the communicator up.
bool ends_this_rank(Code c) { return c == Code::StaleEpoch || c == Code::NoAuthority; }

}  // namespace

Checker::Key Checker::key(const OpenCall& call) {
    return {static_cast<std::int64_t>(call.step) * 16 + static_cast<int>(call.call), call.comm};
}

Checker::Record& Checker::record(const OpenCall& call) {
    Record& r = records_[key(call)];
    if (r.members.empty()) {
        r.call = call.call;
        r.step = call.step;
        r.members = call.members;
    }
    return r;
}

void Checker::posted(Instance& who, const OpenCall& call) { record(call).posted.add(who.slot); }

int Checker::admit_step_of(int slot, std::uint32_t incarnation) const {
    const auto it = admitted_.find({slot, incarnation});
    return it == admitted_.end() ? -1 : it->second;
}

void Checker::check_codes(Instance& who, const OpenCall& call) {
    const Status& status = call.request->status;
    if (status.ok()) return;
    if (call.call == Call::Commit && status.code == Code::Invalid) return;  // refused: check_replay looks whether rightly
    if (call.call == Call::Resume && status.code == Code::Mismatch) return;  // its log group has an older checkpoint
    world_.counters().add((std::string("result ") + to_string(call.call) + ": " + to_string(status.code)).c_str());
    if (world_.scenario().replay && status.code != Code::StaleEpoch &&
        !(status.code == Code::PeerFailure && who.node->comm_solo(call.comm)))
        world_.violate("X", "slot %d: %s: %s: %s", who.slot, describe(call).c_str(), to_string(status.code),
                       status.message.c_str());
    if (world_.scenario().quiet)
        world_.violate("Q", "slot %d: %s failed without a fault: %s: %s", who.slot, describe(call).c_str(),
                       to_string(status.code), status.message.c_str());
    if (status.code == Code::Timeout && !world_.scenario().has_naps)
        world_.violate("L", "slot %d: %s timed out, nobody was late: %s", who.slot, describe(call).c_str(),
                       status.message.c_str());
    if (status.code == Code::Internal || status.code == Code::Invalid || status.code == Code::Unsupported ||
        status.code == Code::System || status.code == Code::Truncated || status.code == Code::Closed)
        world_.violate("API", "slot %d: %s: unexpected %s: %s", who.slot, describe(call).c_str(), to_string(status.code),
                       status.message.c_str());
    if (status.code == Code::NoAuthority && !world_.store().lost && world_.store().boot == 77)
        world_.violate("M", "slot %d: %s: the authority is there: %s", who.slot, describe(call).c_str(), status.message.c_str());
    if (status.code == Code::StaleEpoch && who.epoch == 0)
        world_.violate("M", "slot %d: %s: stale without a view", who.slot, describe(call).c_str());
}

void Checker::completed(Instance& who, OpenCall& call) {
    const Request& q = *call.request;
    world_.trace().text(world_.now(), "%d.%u done: %s: %s %s", who.slot, who.incarnation, describe(call).c_str(),
                        to_string(q.status.code), q.outcome.contributors.text().c_str());
    check_codes(who, call);
    for (const auto* memory : {call.send, call.recv})
        if (memory != nullptr && world_.links().has_lent(who, *memory))
            world_.violate("B", "slot %d: %s is done, and its memory is lent", who.slot, describe(call).c_str());
    if (world_.violation().found()) return;
    if (world_.scenario().replay) {
        check_replay(who, call);
        return;
    }
    if (call.call == Call::Recv) {
        if (q.status.ok()) check_message(who, call);
        else no_leave_is_a_failure(who, call, q.status);
        return;
    }
    if (call.send != nullptr && call.call == Call::Send) {
        Bytes expected(call.send->size());
        fill_message(call.step, who.slot, call.number, expected.size(), expected.data());
        if (expected != *call.send) world_.violate("B", "slot %d: a send buffer was written", who.slot);
        return;
    }
    if (call.call == Call::Join || call.call == Call::Leave) return;
    Record& rec = record(call);
    Result result;
    result.instance = who.id;
    result.code = q.status.code;
    result.at = world_.now();
    ByteWriter w;
    switch (call.call) {
        case Call::Collective:
            if (q.status.ok()) {
                check_collective(who, call, rec);
                if (is_uniform(call.desc.kind)) {
                    for (const auto& c : q.outcome.chunks) w.put(c.offset).put(c.count).ranks(c.contributors);
                    w.ranks(q.outcome.contributors);
                    result.text = q.outcome.contributors.text();
                    for (const auto& c : q.outcome.chunks)
                        result.text +=
                            " [" + std::to_string(c.offset) + "+" + std::to_string(c.count) + " " + c.contributors.text() + "]";
                }
                progress_of(who, call);
            }
            break;
        case Call::Agree: {
            w.put(q.value);
            result.text = std::to_string(q.value);
            if (q.status.ok() || q.status.code == Code::PeerFailure) {
                RankSet cleared;
                for (int slot = 0; slot < 63; ++slot)
                    if ((q.value >> slot & 1) == 0) cleared.add(slot);
                if (!cleared.has(who.slot) || !rec.posted.contains(cleared))
                    world_.violate("U", "slot %d: agree at step %d gave %llx: from %s, called by %s", who.slot, call.step,
                                   static_cast<unsigned long long>(q.value), cleared.text().c_str(), rec.posted.text().c_str());
            }
            break;
        }
        case Call::Shrink:
        case Call::Admit:
            w.put(q.new_comm).ranks(q.survivors);
            result.text = std::to_string(q.new_comm) + " " + q.survivors.text();
            if (!q.status.ok()) break;
            if (!q.survivors.has(call.call == Call::Shrink ? call.rank : who.slot))
                world_.violate("U", "slot %d: %s succeeded without itself: %s", who.slot, describe(call).c_str(),
                               q.survivors.text().c_str());
            if (call.call == Call::Admit)
                for (int slot : q.survivors.list())
                    if (slot < world_.scenario().ranks)
                        admitted_.try_emplace({slot, who.running() ? who.node->incarnation_of(slot) : 0}, call.step);
            break;
        default: break;
    }
    const Bytes words = w.take();
    result.hash = hash64(words);
    rec.results.push_back(std::move(result));
}

// A receive from anyone reports deaths, and who has merely left only when nobody is left.
void Checker::no_leave_is_a_failure(Instance& who, const OpenCall& call, const Status& failure) {
    if (call.peer >= 0 || call.request->source >= 0 || failure.code != Code::PeerFailure) return;
    const auto& why = failure.evidence;
    if (failure.ranks.size() + 1 < call.members.size() && std::find(why.begin(), why.end(), Evidence::Left) != why.end())
        world_.violate("Q", "slot %d: %s: a leave is reported: %s", who.slot, describe(call).c_str(), failure.message.c_str());
}

// B: between two looks an element may change once, from the input to what it then stays until the end.
void Checker::touched(Instance& who) {
    for (auto* call : who.program->open()) {
        if (call->seen.empty() || call->checked || call->request->done.load()) continue;
        const Bytes& now = *call->recv;
        if (now == call->seen) continue;
        const std::uint64_t item = size_of(call->desc.dtype);
        for (std::uint64_t i = 0; i * item < now.size(); ++i) {
            const auto* was = call->seen.data() + i * item;
            if (std::memcmp(was, now.data() + i * item, item) == 0) continue;
            if (std::memcmp(was, call->before.data() + i * item, item) != 0) {
                world_.violate("B", "slot %d: %s: element %llu changed a second time", who.slot, describe(*call).c_str(),
                               static_cast<unsigned long long>(i));
                return;
            }
        }
        call->seen = now;
    }
}

void Checker::event(Instance& who, const NodeEvent& e) {
    switch (e.kind) {
        case NodeEvent::Kind::ViewChanged: {
            const auto [it, fresh] = views_.try_emplace(e.epoch, e.ranks);
            if (!fresh && it->second != e.ranks)
                world_.violate("V", "slot %d: epoch %llu has members %s, elsewhere %s", who.slot,
                               static_cast<unsigned long long>(e.epoch), e.ranks.text().c_str(), it->second.text().c_str());
            if (e.epoch < who.epoch)
                world_.violate("V", "slot %d: epoch went back from %llu to %llu", who.slot,
                               static_cast<unsigned long long>(who.epoch), static_cast<unsigned long long>(e.epoch));
            who.view = e.ranks;
            who.epoch = e.epoch;
            break;
        }
        case NodeEvent::Kind::Stale: who.was_stale = true; break;
        case NodeEvent::Kind::Suspected:
        case NodeEvent::Kind::Removed:
            if (world_.scenario().quiet && e.evidence != Evidence::Left)
                world_.violate("Q", "slot %d: %s slot %d (%s) without a fault", who.slot, ftcomm::to_string(e.kind), e.slot,
                               to_string(e.evidence));
            break;
        default: break;
    }
}

// V: two live ranks that both get on, each with the other voted out. (One that has not heard yet that it is out, and a
// replacement that the other has not heard of yet, are not two groups: their views are on one chain.)
void Checker::progress_of(Instance& who, const OpenCall& call) {
    if (call.members.size() < 2 || who.was_stale) return;
    const auto voted_out = [](const Instance& by, const Instance& other) {
        const auto known = by.node->incarnation_of(other.slot);
        return known > other.incarnation || (known == other.incarnation && !by.view.has(other.slot));
    };
    for (auto& other : world_.instances()) {
        if (other.get() == &who || !who.running() || !other->running() || other->was_stale) continue;
        if (!who.view.has(who.slot) || !other->view.has(other->slot)) continue;  // not in: a replacement that waits
        if (voted_out(who, *other) && voted_out(*other, who)) {
            world_.violate("V", "slots %d %s and %d %s both go on", who.slot, who.view.text().c_str(), other->slot,
                           other->view.text().c_str());
            return;
        }
    }
}

void Checker::finish() {
    if (world_.scenario().replay) {
        finish_replay();
        return;
    }
    const auto survivor = [&](const Result& r) {
        const Instance& i = world_.instance(r.instance);
        return !i.was_stale && (i.left || i.running() || i.program->finished()) && !(i.crashed && !i.left);
    };
    for (auto& [k, rec] : records_) {
        const bool collective = rec.call == Call::Collective;
        const Step* step =
            collective || rec.call == Call::Agree ? &world_.scenario().steps[static_cast<std::size_t>(rec.step)] : nullptr;
        const Result* first = nullptr;
        int survivors = 0;
        bool odd_survived = false, success = false;
        for (const auto& r : rec.results) {
            // A decision that is in the cell holds for the dead as well; an operation's end only among the survivors.
            if (ends_this_rank(r.code) || (collective && !survivor(r)) || world_.instance(r.instance).was_stale) continue;
            ++survivors;
            success = success || r.code == Code::Ok;
            if (step != nullptr && collective && world_.instance(r.instance).slot == step->odd_slot) odd_survived = true;
            if (collective && !is_uniform(step->op)) continue;  // each its whole output, or an error
            if (first == nullptr) {
                first = &r;
                continue;
            }
            const bool same_code = collective ? (r.code == Code::Ok) == (first->code == Code::Ok) : r.code == first->code;
            if (!same_code || (r.code == Code::Ok && r.hash != first->hash)) {
                const Instance &a = world_.instance(first->instance), &b = world_.instance(r.instance);
                world_.violate(
                    "U", "%s at step %d of communicator %llu: slot %d has %s %s (at %.6f), slot %d has %s %s (at %.6f)",
                    collective ? to_string(step->op) : to_string(rec.call), rec.step, static_cast<unsigned long long>(k.second),
                    a.slot, to_string(first->code), first->text.c_str(), static_cast<double>(first->at) * 1e-9, b.slot,
                    to_string(r.code), r.text.c_str(), static_cast<double>(r.at) * 1e-9);
                return;
            }
        }
        if (collective && odd_survived && success && survivors > 1)
            world_.violate("U", "%s at step %d: ranks called different operations, nobody was told", to_string(step->op),
                           rec.step);
    }
    for (auto& i : world_.instances())
        if (i->program != nullptr) i->program->check_scribbles();
}

}  // namespace ftcomm::sim
