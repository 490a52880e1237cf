#include "communicator/failure_log.h"

#include <algorithm>

namespace ftcomm {

namespace {
constexpr std::uint64_t kRevocation = 1;  // aux of a record whose tag is the first operation that is revoked; 0: one that failed
}

Status FailureLog::read() {
    for (std::uint64_t n = 1; n <= log_.last(key_); ++n) {
        LogRecord record;
        if (auto s = log_.find(key_, n, &record); !s) return s;
        const auto seq = static_cast<std::uint64_t>(record.tag);
        if (record.aux == kRevocation) {
            revoked_from_ = seq;
            continue;
        }
        ByteReader r(record.payload);
        known_[seq] = {Cause::decode(r), true};
    }
    return {};
}

const Cause* FailureLog::of(std::uint64_t seq) const {
    const auto it = known_.find(seq);
    return it == known_.end() ? nullptr : &it->second.cause;
}

bool FailureLog::all_noted() const {
    return std::all_of(known_.begin(), known_.end(), [](const auto& f) { return f.second.noted; });
}

std::vector<Failure> FailureLog::list() const {
    std::vector<Failure> out;
    for (const auto& [seq, known] : known_) out.push_back({seq, known.cause});
    return out;
}

void FailureLog::learn(const Decision& d) {
    for (const auto& f : d.failures) known_.try_emplace(f.seq, Known{f.cause, false});
    if (!d.revoked || revoked_from_) return;
    revoked_from_ = d.revoked_from;
    static_cast<void>(log_.append(key_, static_cast<std::int64_t>(d.revoked_from), kRevocation, {}));
}

void FailureLog::note(std::uint64_t seq, const Cause& cause) {
    auto& known = known_.try_emplace(seq, Known{cause, false}).first->second;
    if (known.noted) return;
    ByteWriter w;
    known.cause.encode(w);
    const auto body = w.take();
    const ByteView parts[] = {body};
    known.noted = log_.append(key_, static_cast<std::int64_t>(seq), 0, parts).ok();
}

}  // namespace ftcomm
