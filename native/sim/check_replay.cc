// X: whoever dies however often, every completed call of every incarnation gives what the undisturbed run gave, bit for bit; receives from
// anyone, whose answers depend on time, give what they gave the rank's earlier incarnations.
#include "sim/checker.h"
#include "sim/data.h"
#include "sim/world.h"

namespace ftcomm::sim {

// in_time: depends on when what arrived, so that the undisturbed run need not agree.
void Checker::same(const History::Key& key, std::uint64_t digest, bool in_time, const std::string& what) {
    const auto [it, first] = history_.digests.try_emplace(key, digest);
    if (!first && it->second != digest)
        world_.violate("X", "slot %d: %s: not what an earlier incarnation had", key.slot, what.c_str());
    if (in_time || undisturbed_ == nullptr) return;
    const auto before = undisturbed_->digests.find(key);
    if (before == undisturbed_->digests.end())
        world_.violate("X", "slot %d: %s: never happened in the undisturbed run", key.slot, what.c_str());
    else if (before->second != digest)
        world_.violate("X", "slot %d: %s: not what the undisturbed run had", key.slot, what.c_str());
}

void Checker::sends(Instance& who, OpenCall& call, int of) {
    const auto kind = world_.scenario().steps[static_cast<std::size_t>(call.step)].kind;
    call.sent = hash64(*call.send);
    same({History::What::Sent, who.slot, of, call.peer, call.number}, call.sent, kind == StepKind::Answer, describe(call));
}

void Checker::check_replay(Instance& who, OpenCall& call) {
    const Request& q = *call.request;
    const auto& steps = world_.scenario().steps;
    if (call.call == Call::Commit && (q.status.ok() || q.status.code == Code::Invalid)) {
        if (!q.status.ok() && !steps[static_cast<std::size_t>(call.step)].refused)
            world_.violate("X", "slot %d: %s: refused: %s", who.slot, describe(call).c_str(), q.status.message.c_str());
        same({History::What::Result, who.slot, call.step}, static_cast<std::uint64_t>(q.status.code), false, describe(call));
    }
    if (!q.status.ok()) return;
    switch (call.call) {
        case Call::Send:
            if (hash64(*call.send) != call.sent) world_.violate("B", "slot %d: a send buffer was written", who.slot);
            return;
        case Call::Recv: {
            const Step& step = steps[static_cast<std::size_t>(call.step)];
            const bool anyone = call.peer < 0;
            if (q.source < 0 || q.source >= static_cast<int>(call.members.size()) || (!anyone && q.source != call.peer)) {
                world_.violate("X", "slot %d: %s: from rank %d", who.slot, describe(call).c_str(), q.source);
                return;
            }
            int number = call.number;
            if (anyone) {  // the next of those that this rank has not heard yet from there
                const auto& heard = who.program->heard(call.step);
                number = 2 * static_cast<int>(std::count(heard.begin(), heard.end(), q.source));
                same({History::What::Source, who.slot, call.step, -1, call.number}, static_cast<std::uint64_t>(q.source), true,
                     describe(call) + " from anyone, from rank " + std::to_string(q.source));
            }
            const int of = step.kind == StepKind::WebReceive ? step.of : call.step;
            call.digest = hash64(ByteView(call.recv->data(), std::min<std::size_t>(q.bytes, call.recv->size())));
            const auto sent = history_.digests.find(
                {History::What::Sent, call.members[static_cast<std::size_t>(q.source)], of, call.rank, number});
            if (sent == history_.digests.end() || sent->second != call.digest)
                world_.violate("X", "slot %d: %s from rank %d: not message %d of it", who.slot, describe(call).c_str(), q.source,
                               number);
            return;
        }
        case Call::Collective: {
            if (call.send != nullptr && hash64(*call.send) != call.sent)
                world_.violate("B", "slot %d: %s: the send buffer was written", who.slot, describe(call).c_str());
            ByteWriter w;
            w.ranks(q.outcome.contributors);
            for (const auto& c : q.outcome.chunks) w.put(c.offset).put(c.count).ranks(c.contributors);
            if (call.recv != nullptr) w.bytes(*call.recv);
            call.digest = hash64(w.take());
            same({History::What::Result, who.slot, call.step}, call.digest, false,
                 describe(call) + ", contributors " + q.outcome.contributors.text());
            progress_of(who, call);
            return;
        }
        default: return;
    }
}

void Checker::logged(const LogKey& key, const LogRecord& record) {
    ByteWriter w;
    w.put(record.tag).put(record.aux).bytes(record.payload);
    auto& records = history_.logs[key];
    records.push_back(hash64(w.take()));
    if (records.size() != record.seq)
        world_.violate("X", "record %llu of the stream %d -> %d comes after %zu others",
                       static_cast<unsigned long long>(record.seq), key.src, key.dst, records.size() - 1);
}

// Nothing that was logged has changed since, and nothing is there that was not logged.
void Checker::logs_are_as_written(LogFiles& files) {
    for (const auto& [key, stream] : files.streams) {
        const auto& written = history_.logs[key];
        for (std::size_t i = 0; i < stream.size() || i < written.size(); ++i) {
            ByteWriter w;
            if (i < stream.size()) w.put(stream[i].tag).put(stream[i].aux).bytes(stream[i].payload);
            if (i < stream.size() && i < written.size() && hash64(w.take()) == written[i]) continue;
            world_.violate("X", "record %zu of the stream %d -> %d is not what was logged", i + 1, key.src, key.dst);
            return;
        }
    }
}

void Checker::finish_replay() {
    for (int slot = 0; slot < world_.scenario().ranks; ++slot)
        if (!world_.newest(slot)->left) world_.violate("L", "slot %d did not come to the end of its program", slot);
    if (undisturbed_ == nullptr || world_.violation().found()) return;
    for (const auto& [key, written] : undisturbed_->logs) {
        const auto& now = history_.logs[key];
        if (key.dst == kNotes) continue;  // who goes on from an older one may have lost the newest, or not noted it yet
        if (key.dst == kHeard) continue;  // when word of an answer comes, and how often, depends on who lives then
        const bool in_time = key.dst == kAnswers;  // and messages that say what those were
        if (written.size() != now.size() || (key.dst == kResults && written != now)) {
            if (in_time && written.size() == now.size()) continue;
            world_.violate("X", "the stream %d -> %d of communicator %llu has %zu records, undisturbed %zu%s", key.src, key.dst,
                           static_cast<unsigned long long>(key.comm), now.size(), written.size(),
                           written.size() == now.size() ? ", and others" : "");
            return;
        }
    }
    for (auto& i : world_.instances())
        if (i->program != nullptr) i->program->check_scribbles();
}

}  // namespace ftcomm::sim
