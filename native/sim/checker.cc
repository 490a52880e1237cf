#include "sim/checker.h"

#include <algorithm>
#include <cstring>

#include "sim/data.h"
#include "sim/world.h"

namespace ftcomm::sim {

namespace {

bool uniform_kind(OpKind k) {
    return k == OpKind::AllReduce || k == OpKind::Broadcast || k == OpKind::AllGather || k == OpKind::Barrier;
}

// What the user branches on: go on, or give the communicator up.
bool ends_this_rank(Code c) { return c == Code::StaleEpoch || c == Code::NoAuthority; }

bool reduces(OpKind k) { return k == OpKind::AllReduce || k == OpKind::Reduce || k == OpKind::ReduceScatter; }

std::string describe(const OpenCall& call) {
    std::string name = call.call == Call::Collective ? to_string(call.desc.kind) : to_string(call.call);
    return name + " at step " + std::to_string(call.step) + " of communicator " + std::to_string(call.comm);
}

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
    world_.counters().add((std::string("result ") + to_string(call.call) + ": " + to_string(status.code)).c_str());
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
    if (world_.violation().found()) return;
    if (call.call == Call::Recv) {
        if (q.status.ok()) check_message(who, call);
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
                if (uniform_kind(call.desc.kind)) {
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

void Checker::check_message(Instance& who, OpenCall& call) {
    const Request& q = *call.request;
    const int size = static_cast<int>(call.members.size());
    if (q.source < 0 || q.source >= size || (call.peer >= 0 && q.source != call.peer) || q.bytes != call.recv->size()) {
        world_.violate("X", "slot %d: recv at step %d: from rank %d, %llu bytes, expected rank %d, %zu bytes", who.slot,
                       call.step, q.source, static_cast<unsigned long long>(q.bytes), call.peer, call.recv->size());
        return;
    }
    Bytes expected(call.recv->size());
    fill_message(call.step, call.members[static_cast<std::size_t>(q.source)], call.number, expected.size(), expected.data());
    if (expected != *call.recv)
        world_.violate("X", "slot %d: recv at step %d from rank %d: not message %d of it", who.slot, call.step, q.source,
                       call.number);
    for (const auto& other : who.program->open())
        if (other != &call && other->call == Call::Recv && other->step == call.step && call.peer < 0 &&
            other->request != nullptr && other->request->done.load() && other->request->source == q.source)
            world_.violate("X", "slot %d: a message of rank %d at step %d came twice", who.slot, q.source, call.step);
}

const Bytes& Checker::reference(Record& rec, const Step& step, int step_index, const std::vector<int>& members,
                                const RankSet& contributors, std::uint64_t total) {
    for (const auto& r : rec.references)
        if (r.contributors == contributors) return r.data;
    std::vector<int> slots;
    for (int rank : contributors.list())
        if (rank < static_cast<int>(members.size())) slots.push_back(members[static_cast<std::size_t>(rank)]);
    rec.references.push_back({contributors, reduced(step, step_index, slots, 0, total)});
    return rec.references.back().data;
}

void Checker::check_collective(Instance& who, OpenCall& call, Record& rec) {
    const Request& q = *call.request;
    const OpDesc& d = call.desc;
    const auto& s = world_.scenario();
    const Step& step = s.steps[static_cast<std::size_t>(call.step)];
    if (step.odd_slot == who.slot) return;  // it called something else; finish() looks at whether that was noticed
    const int size = static_cast<int>(call.members.size());
    const std::uint64_t item = size_of(d.dtype);
    if (call.send != nullptr) {
        Bytes expected(call.send->size());
        fill(step, call.step, who.slot, 0, expected.size() / item, expected.data());
        if (expected != *call.send)
            world_.violate("B", "slot %d: %s: the send buffer was written", who.slot, describe(call).c_str());
    }
    const RankSet everyone = RankSet::first(size);
    RankSet posted;
    for (int rank = 0; rank < size; ++rank)
        if (rec.posted.has(call.members[static_cast<std::size_t>(rank)])) posted.add(rank);
    const auto& contributors = q.outcome.contributors;
    if (!posted.contains(contributors))
        world_.violate("U", "slot %d: %s: contributors %s, but only %s have called it", who.slot, describe(call).c_str(),
                       contributors.text().c_str(), posted.text().c_str());
    const bool from_root = d.kind == OpKind::Broadcast && d.count > 0;  // its contributor is the root
    if (s.comms[static_cast<std::size_t>(call.comm_index)].policy == Policy::Raise && !from_root && contributors != everyone)
        world_.violate("U", "slot %d: %s under raise: contributors %s of %d", who.slot, describe(call).c_str(),
                       contributors.text().c_str(), size);
    if (s.quiet && !from_root && contributors != everyone)
        world_.violate("Q", "slot %d: %s: contributors %s of %d without a fault", who.slot, describe(call).c_str(),
                       contributors.text().c_str(), size);
    std::uint64_t total = d.count;
    if (d.kind == OpKind::AllGather) total = d.count * static_cast<std::uint64_t>(size);
    else if ((d.kind == OpKind::Gather || d.kind == OpKind::AllToAll) && call.recv != nullptr) total = call.recv->size() / item;
    else if (call.recv == nullptr) total = 0;
    std::uint64_t at = 0;
    auto chunks = q.outcome.chunks;
    const bool direct = d.kind == OpKind::Gather || d.kind == OpKind::Scatter || d.kind == OpKind::AllToAll;
    if (direct) chunks = {{0, total, contributors}};
    for (const auto& chunk : chunks) {
        if (chunk.offset != at || chunk.offset + chunk.count > total)
            if (call.recv != nullptr)
                world_.violate("U", "slot %d: %s: chunk [%llu, +%llu) of %llu after %llu", who.slot, describe(call).c_str(),
                               static_cast<unsigned long long>(chunk.offset), static_cast<unsigned long long>(chunk.count),
                               static_cast<unsigned long long>(total), static_cast<unsigned long long>(at));
        at = chunk.offset + chunk.count;
        if (call.recv != nullptr && chunk.count > 0 && !world_.violation().found()) check_chunk(who, call, rec, chunk);
    }
    if (call.recv != nullptr && at != total && !world_.violation().found())
        world_.violate("U", "slot %d: %s: chunks cover %llu of %llu elements", who.slot, describe(call).c_str(),
                       static_cast<unsigned long long>(at), static_cast<unsigned long long>(total));
}

void Checker::check_chunk(Instance& who, OpenCall& call, Record& rec, const Chunk& chunk) {
    const OpDesc& d = call.desc;
    const Step& step = world_.scenario().steps[static_cast<std::size_t>(call.step)];
    const int size = static_cast<int>(call.members.size()), root = d.root;
    const std::uint64_t item = size_of(d.dtype);
    const auto slot_of = [&](int rank) { return call.members[static_cast<std::size_t>(rank)]; };
    const auto compare = [&](std::uint64_t offset, const std::byte* expected, std::uint64_t count) {
        if (std::memcmp(call.recv->data() + offset * item, expected, count * item) == 0) return;
        std::uint64_t i = 0;
        while (std::memcmp(call.recv->data() + (offset + i) * item, expected + i * item, item) == 0) ++i;
        world_.violate("U", "slot %d: %s(%s %s): element %llu is wrong for contributors %s", who.slot, describe(call).c_str(),
                       ftcomm::to_string(d.dtype), ftcomm::to_string(d.op), static_cast<unsigned long long>(offset + i),
                       chunk.contributors.text().c_str());
    };
    if (reduces(d.kind)) {
        if (d.kind != OpKind::Reduce || call.rank == root)
            if (chunk.contributors.empty())
                world_.violate("U", "slot %d: %s: a chunk of nobody", who.slot, describe(call).c_str());
        const std::uint64_t all = d.kind == OpKind::ReduceScatter ? d.count * static_cast<std::uint64_t>(size) : d.count;
        const Bytes& ref = reference(rec, step, call.step, call.members, chunk.contributors, all);
        const std::uint64_t base = d.kind == OpKind::ReduceScatter ? d.count * static_cast<std::uint64_t>(call.rank) : 0;
        compare(chunk.offset, ref.data() + (base + chunk.offset) * item, chunk.count);
        return;
    }
    if (d.kind == OpKind::Broadcast || d.kind == OpKind::Scatter) {
        std::uint64_t base = 0;
        if (d.kind == OpKind::Scatter)
            for (int k = 0; k < call.rank; ++k) base += piece(step, root, k);
        Bytes expected(chunk.count * item);
        fill(step, call.step, slot_of(root), base + chunk.offset, chunk.count, expected.data());
        compare(chunk.offset, expected.data(), chunk.count);
        return;
    }
    // Blocks by source rank; those of ranks that did not contribute are not looked at.
    std::uint64_t start = 0;
    for (int from = 0; from < size; ++from) {
        std::uint64_t length = d.kind == OpKind::AllGather ? step.count
                               : d.kind == OpKind::Gather  ? piece(step, from, root)
                                                           : piece(step, from, call.rank);
        const std::uint64_t low = std::max(start, chunk.offset), high = std::min(start + length, chunk.offset + chunk.count);
        if (low < high && chunk.contributors.has(from)) {
            std::uint64_t base = 0;
            if (d.kind == OpKind::AllToAll)
                for (int k = 0; k < call.rank; ++k) base += piece(step, from, k);
            Bytes expected((high - low) * item);
            fill(step, call.step, slot_of(from), base + low - start, high - low, expected.data());
            compare(low, expected.data(), high - low);
        }
        start += length;
    }
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
            if (collective && !uniform_kind(step->op)) continue;  // each its whole output, or an error
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
