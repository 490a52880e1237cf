// What receives were told that depends on time: who answered ANY, and which were given up. On record before the program can act on it, so
// that a process that runs again is told the same (L5); and what is to be done when a stream cannot be read or written any more.
#include "base/failpoint.h"
#include "communicator/logged_pairs.h"

namespace ftcomm {

// Of the processes before this one.
void LoggedPairs::read_answers() {
    const LogKey key{spec_.id, core_.self(), kAnswers};
    const auto read = [&](std::uint64_t from, std::uint64_t to) {
        for (auto seq = from; seq <= to; ++seq) {
            LogRecord record;
            if (auto s = log_.find(key, seq, &record); !s) {
                broke(std::move(s));
                return;
            }
            ByteReader r(record.payload);
            Asked asked{r.get<std::uint64_t>(), r.get<std::int32_t>(), record.tag, r.get<std::uint64_t>()};
            Answer answer{static_cast<int>(static_cast<std::int64_t>(record.aux)), std::nullopt};
            if (answer.source < 0) answer.failure = Cause::decode(r);
            answers_[asked] = std::move(answer);
        }
    };
    if (log_.is_split()) read(1, log_.base(key));
    read(log_.first(key), log_.last(key));
}

Status LoggedPairs::remember(const Recv& r, const Answer& answer) {
    if (r.answered || !core_.rules.l5 || channel_ != Channel::Messages) return {};
    const auto what = asked(r);
    ByteWriter w;
    w.put(what.mark).put(static_cast<std::int32_t>(what.src)).put(what.number);
    if (answer.failure) answer.failure->encode(w);
    const auto body = w.take();
    const ByteView parts[] = {body};
    FT_POINT("channel.answer.before");
    auto s = log_.append({spec_.id, core_.self(), kAnswers}, what.tag,
                         static_cast<std::uint64_t>(static_cast<std::int64_t>(answer.source)), parts);
    FT_POINT("channel.answer.after");
    return s;
}

// Run again it would find a message that came later, and take it from the receive after it.
void LoggedPairs::give_up(const Recv& r, Status status) {
    const auto request = r.request;
    if (auto s = remember(r, {-1, Cause::of(status)}); !s) status = std::move(s);
    core_.finish(request, std::move(status));
}

// A stream that cannot be used: nothing of this rank can go on, nor could it say so to whoever waits for the records. It fails, with a
// clear word, and what comes in its place looks at the log first.
void LoggedPairs::broke(Status status) {
    broken_ = status;
    if (core_.abandoned) core_.abandoned = std::move(status).within("the log of communicator " + spec_.name);
}

}  // namespace ftcomm
