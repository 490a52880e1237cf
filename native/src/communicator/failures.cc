// Failed operations under the policy replay. That all saw one fail is history as well: whoever runs again must see the same, also
// where its own log has a result of it (logged, and given up before the fence was through), and when everybody who decided it is dead.
//
// A failure is on record before the call returns; every vote carries those that its rank knows, from its memory or its log; every decision
// carries all of them. What is in no living rank's memory and in no log, no call has returned.
#include "base/check.h"
#include "communicator/communicator.h"

namespace ftcomm {

namespace {
constexpr std::uint64_t kRevocation = 1;  // aux of a record whose tag is the first operation that is revoked; 0: one that failed
}

// Of the processes before this one.
Status Communicator::read_failures() {
    const auto key = note_key(kFailures);
    auto& log = *core_.config.log;
    for (std::uint64_t n = 1; n <= log.last(key); ++n) {
        LogRecord record;
        if (auto s = log.find(key, n, &record); !s) return s;
        const auto seq = static_cast<std::uint64_t>(record.tag);
        if (record.aux == kRevocation) {
            decision_.revoked = true;
            decision_.revoked_from = seq;
            revocation_noted_ = true;
            continue;
        }
        ByteReader r(record.payload);
        failures_[seq] = {Cause::decode(r), true};
    }
    return {};
}

const Cause* Communicator::failure_of(std::uint64_t seq) const {
    const auto it = failures_.find(seq);
    return it == failures_.end() ? nullptr : &it->second.cause;
}

void Communicator::learn_failures(const Decision& d) {
    for (const auto& f : d.failures) failures_.try_emplace(f.seq, KnownFailure{f.cause, false});
    if (d.revoked && !revocation_noted_) {
        revocation_noted_ = true;
        const auto key = note_key(kFailures);
        static_cast<void>(core_.config.log->append(key, static_cast<std::int64_t>(d.revoked_from), kRevocation, {}));
    }
}

// One that fails at once because of a revocation needs no record: the revocation has one.
void Communicator::note_failure(std::uint64_t seq, const Cause& cause) {
    if (seq >= decision_.revoked_from) return;
    auto& known = failures_.try_emplace(seq, KnownFailure{cause, false}).first->second;
    if (known.noted) return;
    ByteWriter w;
    known.cause.encode(w);
    const auto body = w.take();
    const ByteView parts[] = {body};
    known.noted = core_.config.log->append(note_key(kFailures), static_cast<std::int64_t>(seq), 0, parts).ok();
}

}  // namespace ftcomm
