#include "sim/report.h"

#include <cstdio>
#include <cstring>

namespace ftcomm::sim {

void Counters::add(const char* name, std::uint64_t n) {
    std::uint64_t h = 0xcbf29ce484222325ULL;
    for (const char* p = name; *p != '\0'; ++p) h = (h ^ static_cast<std::uint64_t>(*p)) * 0x100000001b3ULL;
    h ^= h >> 29;
    for (int i = 0; i < kSlots; ++i) {
        Cell& cell = cells_[(h + static_cast<std::uint64_t>(i)) % kSlots];
        if (cell.name[0] == '\0') std::snprintf(cell.name, sizeof cell.name, "%s", name);
        if (std::strncmp(cell.name, name, sizeof cell.name - 1) == 0) {
            cell.count += n;
            return;
        }
    }
}

void Counters::merge(const Cell* cells, std::map<std::string, std::uint64_t>& into) {
    for (int i = 0; i < kSlots; ++i)
        if (cells[i].name[0] != '\0') into[cells[i].name] += cells[i].count;
}

const char* to_string(FrameKind kind) {
    switch (kind) {
        case FrameKind::View: return "View";
        case FrameKind::Vote: return "Vote";
        case FrameKind::Freeze: return "Freeze";
        case FrameKind::Decision: return "Decision";
        case FrameKind::AgreeVote: return "AgreeVote";
        case FrameKind::AgreeResult: return "AgreeResult";
        case FrameKind::AdmitVote: return "AdmitVote";
        case FrameKind::JoinRequest: return "JoinRequest";
        case FrameKind::Leave: return "Leave";
        case FrameKind::LeaveOk: return "LeaveOk";
        case FrameKind::Goodbye: return "Goodbye";
        case FrameKind::Ping: return "Ping";
        case FrameKind::Replaying: return "Replaying";
        case FrameKind::RestoreAsk: return "RestoreAsk";
        case FrameKind::RestoreReply: return "RestoreReply";
        case FrameKind::Votes: return "Votes";
        case FrameKind::Dispute: return "Dispute";
        case FrameKind::Enter: return "Enter";
        case FrameKind::ReduceScatter: return "ReduceScatter";
        case FrameKind::Gather: return "Gather";
        case FrameKind::Token: return "Token";
        case FrameKind::Fence: return "Fence";
        case FrameKind::Flat: return "Flat";
        case FrameKind::Direct: return "Direct";
        case FrameKind::PullEnter: return "PullEnter";
        case FrameKind::PullReady: return "PullReady";
        case FrameKind::GroupEnter: return "GroupEnter";
        case FrameKind::GroupSum: return "GroupSum";
        case FrameKind::GroupFinal: return "GroupFinal";
        case FrameKind::GroupReady: return "GroupReady";
        case FrameKind::Shared: return "Shared";
        case FrameKind::ShareAsk: return "ShareAsk";
        case FrameKind::StageEnter: return "StageEnter";
        case FrameKind::StageGo: return "StageGo";
        case FrameKind::Eager: return "Eager";
        case FrameKind::Rts: return "Rts";
        case FrameKind::Cts: return "Cts";
        case FrameKind::Data: return "Data";
        case FrameKind::LogMark: return "LogMark";
        case FrameKind::LogWant: return "LogWant";
        case FrameKind::LogPiece: return "LogPiece";
        case FrameKind::LogShown: return "LogShown";
        case FrameKind::LogAnswered: return "LogAnswered";
        case FrameKind::GroupResume: return "GroupResume";
    }
    return "?";
}

void Trace::frame(Time at, const char* what, int from, std::uint32_t from_inc, int to, std::uint32_t to_inc,
                  const FrameHeader& h) {
    Record& r = records_[next_++ % kKept];
    r.at = at;
    r.what = what;
    r.from = from;
    r.from_inc = from_inc;
    r.to = to;
    r.to_inc = to_inc;
    r.header = h;
    if (live_) std::printf("%s\n", words(r).c_str());
}

void Trace::text(Time at, const char* format, ...) {
    Record& r = records_[next_++ % kKept];
    r.at = at;
    r.what = nullptr;
    va_list arguments;
    va_start(arguments, format);
    if (live_) {
        va_list again;
        va_copy(again, arguments);
        std::printf("%12.6f  ", static_cast<double>(at) * 1e-9);
        std::vprintf(format, again);
        std::printf("\n");
        va_end(again);
    }
    std::vsnprintf(r.text, sizeof r.text, format, arguments);
    va_end(arguments);
}

std::string Trace::words(const Record& r) {
    char line[320];
    if (r.what == nullptr) std::snprintf(line, sizeof line, "%12.6f  %s", static_cast<double>(r.at) * 1e-9, r.text);
    else
        std::snprintf(
            line, sizeof line,
            "%12.6f  %s %d.%u -> %d.%u %s comm %llx seq %llu attempt %u step %u segment %u aux %llx,%llx flags %u (%u B)",
            static_cast<double>(r.at) * 1e-9, r.what, r.from, r.from_inc, r.to, r.to_inc, to_string(r.header.kind),
            static_cast<unsigned long long>(r.header.comm), static_cast<unsigned long long>(r.header.seq), r.header.attempt,
            r.header.step, r.header.segment, static_cast<unsigned long long>(r.header.aux),
            static_cast<unsigned long long>(r.header.aux2), r.header.flags, r.header.length);
    return line;
}

std::string Trace::last(int n) const {
    std::string out;
    const std::uint64_t first = next_ > static_cast<std::uint64_t>(n) ? next_ - static_cast<std::uint64_t>(n) : 0;
    for (std::uint64_t i = first; i < next_; ++i) out += "    " + words(records_[i % kKept]) + "\n";
    return out;
}

void Trace::print_last(int n) const {
    const std::string text = last(n);
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
}

}  // namespace ftcomm::sim
