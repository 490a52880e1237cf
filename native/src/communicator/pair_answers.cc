// What the program was told that depends on time: who answered ANY, which receives were given up, which sends found no room. On record
// before the program can act on it, so that a process that runs again is told the same (L5); and what is to be done when a stream cannot be
// read or written any more.
#include <algorithm>
#include <limits>

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
            told_.add(asked.mark);
        }
    };
    if (log_.is_split()) read(1, log_.base(key));
    read(log_.first(key), log_.last(key));
}

std::vector<LoggedPairs::Asks> LoggedPairs::asks() const {
    std::vector<Asks> out;
    for (const auto& [what, count] : asked_) out.push_back({what.first, what.second, count});
    return out;
}

void LoggedPairs::count_on(const std::vector<Asks>& asks) {
    for (const auto& a : asks) asked_[{a.src, a.tag}] = a.count;
}

Status LoggedPairs::remember(const Recv& r, const Answer& answer) { return r.answered ? Status{} : remember(asked(r), answer); }

Status LoggedPairs::remember(const Asked& what, const Answer& answer) {
    if (!core_.rules.l5 || channel_ != Channel::Messages) return {};
    ByteWriter w;
    w.put(what.mark).put(static_cast<std::int32_t>(what.src)).put(what.number);
    if (answer.failure) answer.failure->encode(w);
    const auto body = w.take();
    const ByteView parts[] = {body};
    FT_POINT("channel.answer.before");
    auto s = log_.append({spec_.id, core_.self(), kAnswers}, what.tag,
                         static_cast<std::uint64_t>(static_cast<std::int64_t>(answer.source)), parts);
    FT_POINT("channel.answer.after");
    const auto elsewhere = [&](int slot) { return !log_.readable(slot); };
    if (s && std::any_of(spec_.members.begin(), spec_.members.end(), elsewhere) && told_.add(what.mark))
        for (int r = 0; r < static_cast<int>(peers_.size()); ++r) tell_answered(r, what.mark);
    return s;
}

// If this rank's log is lost, nobody can tell its replacement who answered ANY. That there was an answer, the others know before they can see
// what followed from it: the word goes out on each link before anything else does. Once for each mark, and only where hosts can be lost alone.
void LoggedPairs::tell_answered(int rank, std::uint64_t mark) {
    if (!reachable(rank)) return;
    auto h = header(FrameKind::LogAnswered);
    h.seq = mark;
    core_.sender.send(slot_of(rank), h);
}

// On record before anything that came after it.
void LoggedPairs::on_answered(int rank, std::uint64_t mark) {
    if (!heard_[static_cast<std::size_t>(rank)].add(mark)) return;
    const LogKey key{spec_.id, core_.self(), kHeard, mark == 0 ? 0 : 1};
    if (auto s = core_.config.log->append(key, slot_of(rank), mark, {}); !s) broke(std::move(s));
}

void LoggedPairs::read_heard() {
    if (!core_.config.again) return;
    auto& log = *core_.config.log;
    for (int part : {0, 1}) {
        const LogKey key{spec_.id, core_.self(), kHeard, part};
        for (auto seq = log.first(key); seq <= log.last(key); ++seq) {
            LogRecord record;
            if (auto s = log.find(key, seq, &record); !s) {
                broke(std::move(s));
                return;
            }
            if (record.aux == kRestored) continue;
            for (std::size_t r = 0; r < heard_.size(); ++r)
                if (spec_.members[r] == record.tag) heard_[r].add(record.aux);
        }
    }
}

void LoggedPairs::forget_heard(std::uint64_t before) {
    auto& log = *core_.config.log;
    const LogKey key{spec_.id, core_.self(), kHeard, 1};
    LogRecord record;
    auto through = log.first(key) - 1;
    while (through < log.last(key) && log.peek(key, through + 1, &record) && record.aux < before) ++through;
    if (through < log.first(key)) return;
    if (auto s = log.collect(key, through); !s) broke(std::move(s));
}

void LoggedPairs::forget_answers(std::uint64_t before) {
    answers_.erase(answers_.begin(), answers_.lower_bound(Asked{before, -1, std::numeric_limits<std::int64_t>::min(), 0}));
}

// Run again it would find a message that came later, and take it from the receive after it.
void LoggedPairs::give_up(const Recv& r, Status status) {
    const auto request = r.request;
    if (auto s = remember(r, {-1, Cause::of(status)}); !s) status = std::move(s);
    core_.finish(request, std::move(status));
}

// There may be room when it is run again. Where there is none even for this answer it is on no record, and not counted.
void LoggedPairs::refuse(const RequestPtr& request, int dst, Status status) {
    if (status.code == Code::LogFull && remember(asked(dst), {-1, Cause::of(status)})) ++peer(dst).refused;
    core_.finish(request, std::move(status));
}

bool LoggedPairs::refused_before(const RequestPtr& request, int dst) {
    const auto it = answers_.find(asked(dst));
    if (it == answers_.end() || !it->second.failure) return false;
    ++peer(dst).refused;
    core_.finish(request, it->second.failure->status(""));
    return true;
}

// A stream that cannot be used: nothing of this rank can go on, nor could it say so to whoever waits for the records. It fails, with a
// clear word, and what comes in its place looks at the log first.
void LoggedPairs::broke(Status status) {
    broken_ = status;
    if (core_.abandoned) core_.abandoned = std::move(status).within("the log of communicator " + spec_.name);
}

}  // namespace ftcomm
