#include "communicator/lost_logs.h"

#include <algorithm>
#include <utility>

namespace ftcomm {

Communicator::LostLogs::LostLogs(Communicator& comm)
    : comm_(comm), core_(comm.core_), spec_(comm.spec_), rank_(comm.rank_), since_(comm.spec_.members.size()) {}

bool Communicator::LostLogs::is_own_lost() const {
    return core_.config.again && core_.config.log->lost() && since_[static_cast<std::size_t>(rank_)] == 0;
}

// Of this rank: its log was lost, and is here again since that incarnation. Of others: as decisions have told.
Status Communicator::LostLogs::read() {
    if (!core_.config.again) return {};
    auto& log = *core_.config.log;
    for (std::uint64_t n = 1; n <= log.last(comm_.note_key(kHeard)); ++n) {
        LogRecord record;
        if (auto s = log.find(comm_.note_key(kHeard), n, &record); !s) return s;
        if (record.aux != kRestored) continue;
        ByteReader r(record.payload);
        for (std::size_t m = 0; m < since_.size(); ++m)
            if (spec_.members[m] == record.tag) since_[m] = r.get<std::uint32_t>();
    }
    return {};
}

void Communicator::LostLogs::note(std::size_t rank, std::uint32_t incarnation) {
    ByteWriter w;
    w.put(incarnation);
    const auto body = w.take();
    const ByteView parts[] = {body};
    auto s = core_.config.log->append(comm_.note_key(kHeard), spec_.members[rank], kRestored, parts);
    if (s) since_[rank] = incarnation;
    else if (core_.abandoned) core_.abandoned = std::move(s);
}

// On record before this rank goes on with the others: from now on the rank's older logs count for nothing.
void Communicator::LostLogs::learn(const std::vector<std::uint32_t>& decided) {
    for (std::size_t r = 0; r < decided.size() && r < since_.size(); ++r)
        if (decided[r] > since_[r]) note(r, decided[r]);
}

// A rank may have lost its log, begun another one elsewhere, and been started again where the first one is. That log is whole, and not what
// has become of the rank since. The others know, and nothing is decided with it.
bool Communicator::LostLogs::has_older(const std::map<int, Vote>& votes) {
    bool older = false;
    for (const auto& [rank, vote] : votes) {
        const auto r = static_cast<std::size_t>(rank);
        const auto of = [r](const Vote& v) { return r < v.log_since.size() ? v.log_since[r] : 0; };
        const auto own = of(vote);
        if (std::none_of(votes.begin(), votes.end(), [&](const auto& v) { return of(v.second) > own; })) continue;
        older = true;
        if (rank == rank_) {
            on_older();
            continue;
        }
        RestoreState state;
        state.older = true;
        ByteWriter w;
        RestoreAsk{}.encode(w);
        state.encode(w);
        core_.sender.send_long(spec_.members[r], comm_.control(FrameKind::RestoreReply), w.take());
        comm_.ballot_.forget(rank);
    }
    return older;
}

void Communicator::LostLogs::on_older() {
    if (!core_.abandoned) return;
    core_.abandoned = Status::error(
        Code::LogCorrupt,
        "the log of rank " + std::to_string(rank_) + " in communicator " + spec_.name +
            " on this host is an older one: the rank has logged on another host since. Start the replacement there; or "
            "remove the log's folder here, and the other ranks are asked for what they have");
}

bool Communicator::LostLogs::any() const {
    return std::any_of(since_.begin(), since_.end(), [](auto since) { return since > 0; });
}

}  // namespace ftcomm
