// Ranks that have made a communicator with different members: a program's mistake, of which none may get a wrong result. Each fails whatever it
// has in it and tells all whom either list names, and later whoever still sends something, so that nobody waits for an answer. What tells them
// apart are the descriptions that votes carry, a frame from a rank that is no member here, and, in between, the operations' signatures, which
// the members are part of.
#include "base/joined.h"
#include "communicator/communicator.h"

namespace ftcomm {
bool Communicator::is_disputed_by(int slot, const FrameHeader& h, ByteView payload) {
    std::optional<CommSpec> theirs;
    if (is_described(h.kind)) {
        ByteReader r(description(h.kind, payload));
        theirs = decode_spec(r);
        if (!r.ok()) theirs.reset();
    }
    const bool same = rank_of_slot(slot) >= 0 && (!theirs || theirs->members == spec_.members);
    const bool tells = h.kind == FrameKind::Dispute;
    if (!disputed() && (!same || tells)) dispute(slot, theirs ? &*theirs : nullptr);
    else if (disputed() && !tells) tell_of_dispute(slot);  // it goes on without having heard: a replacement, for one
    return disputed();
}

void Communicator::dispute(int slot, const CommSpec* theirs) {
    core_.host.trace("comm.disputed");
    const std::string who = "rank " + std::to_string(slot) + " of the job ";
    std::string what = who + "takes part in it, which this one made with the job's ranks ";
    if (theirs != nullptr && theirs->members == spec_.members) what = who + "has heard of other members than ";
    else if (theirs != nullptr)
        what = who + "made it with the job's ranks {" + joined(theirs->members, ",") + "}, this one with ";
    disputed_ = Status::error(
        Code::Mismatch, "communicator " + spec_.name + ": " + what + "{" + joined(spec_.members, ",") +
                            "}; every member has to give the same ones. Those that are left after deaths come from shrink()");
    RankSet all = RankSet::only(slot);
    for (int m : spec_.members) all.add(m);
    if (theirs != nullptr)
        for (int m : theirs->members)
            if (m >= 0 && m < core_.config.world_size) all.add(m);
    for (int to : all.list())
        if (to != core_.self()) tell_of_dispute(to);
    frozen_ = false;
    proposals_.clear();
    fail_everything(disputed_);
}

void Communicator::tell_of_dispute(int slot) {
    if (!core_.view.members[static_cast<std::size_t>(slot)].alive) return;
    ByteWriter w;
    encode_spec(w, spec_);
    core_.sender.send_long(slot, control(FrameKind::Dispute), w.take());
}

}  // namespace ftcomm
