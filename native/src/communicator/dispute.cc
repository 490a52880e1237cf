// Ranks that have made a communicator with different members or policies: a program's mistake, of which none may get a wrong result. Each
// fails whatever it has in it and tells all whom either list names, and later whoever still sends something, so that nobody waits for an
// answer. What tells them apart are the descriptions that votes carry, a frame from a rank that is no member here, and, in between, the
// operations' signatures, which members and policy are part of.
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
    const bool same =
        rank_of_slot(slot) >= 0 && (!theirs || (theirs->members == spec_.members && theirs->policy == spec_.policy));
    const bool tells = h.kind == FrameKind::Dispute;
    if (!disputed() && (!same || tells)) dispute(slot, theirs ? &*theirs : nullptr);
    else if (disputed() && !tells) tell_of_dispute(slot);  // it goes on without having heard: a replacement, for one
    return disputed();
}

void Communicator::dispute(int slot, const CommSpec* theirs) {
    core_.host.trace("comm.disputed");
    disputed_ = Status::error(
        Code::Mismatch, "communicator " + spec_.name + ": rank " + std::to_string(slot) + " of the job " + difference(theirs));
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

// What that rank has done, with the list of members that it has told, if it has.
std::string Communicator::difference(const CommSpec* theirs) const {
    const auto slots = [](const std::vector<int>& members) { return "{" + joined(members, ",") + "}"; };
    if (theirs != nullptr && theirs->policy != spec_.policy)
        return std::string("made it with the policy ") + to_string(theirs->policy) + ", this one with " +
               to_string(spec_.policy) + "; every member has to give the same one";
    std::string what = "takes part in it, which this one made with the job's ranks ";
    if (theirs != nullptr && theirs->members == spec_.members) what = "has heard of other members than ";
    else if (theirs != nullptr) what = "made it with the job's ranks " + slots(theirs->members) + ", this one with ";
    return what + slots(spec_.members) +
           "; every member has to give the same ones. Those that are left after deaths come from shrink()";
}

void Communicator::tell_of_dispute(int slot) {
    if (!core_.view.members[static_cast<std::size_t>(slot)].alive) return;
    ByteWriter w;
    encode_spec(w, spec_);
    core_.sender.send_long(slot, control(FrameKind::Dispute), w.take());
}

}  // namespace ftcomm
