// Ranks that have made a communicator with different members: a program's mistake, of which none may get a wrong result. Each fails whatever it
// has in it and tells all whom either list names, so that nobody waits for an answer. What tells them apart are the descriptions that votes carry,
// a frame from a rank that is no member here, and, in between, the operations' signatures, which the members are part of.
#include "communicator/communicator.h"

namespace ftcomm {
namespace {

std::string slots(const std::vector<int>& members) {
    std::string text;
    for (int m : members) text += (text.empty() ? "" : ",") + std::to_string(m);
    return "{" + text + "}";
}

}  // namespace

bool Communicator::is_disputed_by(int slot, const FrameHeader& h, ByteView payload) {
    std::optional<CommSpec> theirs;
    if (is_described(h.kind)) {
        ByteReader r(description(h.kind, payload));
        theirs = decode_spec(r);
        if (!r.ok()) theirs.reset();
    }
    const bool same = rank_of_slot(slot) >= 0 && (!theirs || theirs->members == spec_.members);
    if (!same) dispute(slot, theirs ? &*theirs : nullptr);
    return !disputed_ || h.kind == FrameKind::Dispute;
}

void Communicator::dispute(int slot, const CommSpec* theirs) {
    RankSet all;
    for (int m : spec_.members) all.add(m);
    all.add(slot);
    if (theirs != nullptr)
        for (int m : theirs->members)
            if (m >= 0 && m < core_.config.world_size) all.add(m);
    all.remove(core_.self());
    ByteWriter w;
    encode_spec(w, spec_);
    const Bytes mine = w.take();
    for (int to : (all - told_).list())
        if (core_.view.members[static_cast<std::size_t>(to)].alive) core_.sender.send_long(to, control(FrameKind::Dispute), mine);
    told_ = told_ | all;
    if (!disputed_) return;
    core_.host.trace("comm.disputed");
    const std::string who = "rank " + std::to_string(slot) + " of the job ";
    const std::string what = theirs != nullptr
                                 ? who + "made it with the job's ranks " + slots(theirs->members) + ", this one with "
                                 : who + "takes part in it, which this one made with ";
    disputed_ = Status::error(
        Code::Mismatch, "communicator " + spec_.name + ": " + what + slots(spec_.members) +
                            "; every member has to give the same ones. Those that are left after deaths come from shrink()");
    frozen_ = false;
    proposals_.clear();
    fail_everything(disputed_);
}

}  // namespace ftcomm
