// What a successful call has left in its buffers: every element, against the inputs of those who contributed.
#include "sim/checker.h"

#include <algorithm>
#include <cstring>

#include "sim/data.h"
#include "sim/world.h"

namespace ftcomm::sim {

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
        if (call.in_place) {  // the result from there, and what was there before
            const auto at = static_cast<std::uint64_t>(call.rank) * d.count * item;
            std::copy_n(call.send->data() + at, call.recv->size(), call.recv->data());
            std::copy_n(expected.data() + at, call.recv->size(), call.send->data() + at);
        }
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
    if (is_reduction(d.kind)) {
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

}  // namespace ftcomm::sim
