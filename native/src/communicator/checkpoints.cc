// Checkpoints under the policy replay: marks in the log say where the program was at each, so that a process can go on from there, and what
// comes before is given up. (The hybrid of checkpoints and log that Grover and Rajagopal 2022 leave to future work.)
//
// Mark 1 is the resume point: what comes before it, every process does again (L6). Mark n + 1 is the nth checkpoint. A rank writes it once an
// agreement (checkpoint_agreement.cc) has shown that all ranks are there, with no message under way. In it, each rank says how many marks
// it has written: what all have acknowledged stays (L2), and the mark before that, for a checkpoint that turns out to be damaged (L4). What
// is older is given up.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/joined.h"
#include "communicator/checkpoints.h"

namespace ftcomm {

std::optional<Mark> Communicator::Checkpoints::read_mark(std::uint64_t number) const {
    auto& log = *core_.config.log;
    LogRecord record;
    const auto key = comm_.note_key(kMarks);
    if (number < log.first(key) || number > log.last(key) || !log.find(key, number, &record)) return std::nullopt;
    return Mark::decode(record.payload);
}

// Before this rank says that it is there. What fails here the others hear of, and write no mark either: else the next one would have
// another number on this rank than on them.
Status Communicator::Checkpoints::prepare_mark(const std::string& tag, const ProgramPlace& here) {
    auto& log = *core_.config.log;
    const auto key = comm_.note_key(kMarks);
    if (marks_ + 1 <= log.last(key)) return {};  // done again
    // L15: who goes on from here does not do again what comes before. All that the mark counts is in the log.
    if (core_.rules.l15)
        if (auto s = log.flush(); !s) return s;
    return log.make_room(key, Mark{tag, here, here}.encode().size());
}

// All others have agreed, and write theirs: this rank has it, too, or goes no further. Its replacement comes here again.
Status Communicator::Checkpoints::write_mark(const Mark& mark) {
    auto s = append_mark(mark);
    if (!s && core_.abandoned) core_.abandoned = s;
    return s;
}

Status Communicator::Checkpoints::append_mark(const Mark& mark) {
    const auto bytes = mark.encode();
    const ByteView parts[] = {bytes};
    return core_.config.log->append(comm_.note_key(kMarks), 0, 0, parts);
}

// Of a process before this one: then the log is in two parts from the start.
Status Communicator::Checkpoints::find_resume_point() {
    const auto last = core_.config.log->last(comm_.note_key(kMarks));
    if (last == 0) return {};
    const auto newest = read_mark(last);
    if (!newest) return damaged_marks();
    std::map<LogKey, std::uint64_t> bases;
    for (std::size_t r = 0; r < spec_.members.size(); ++r) {
        const int other = spec_.members[r];
        for (auto channel : {LoggedPairs::Channel::Messages, LoggedPairs::Channel::Ring}) {
            const auto& at = channel == LoggedPairs::Channel::Messages ? newest->base.messages : newest->base.ring;
            bases[LoggedPairs::key(spec_, channel, core_.self(), other)] = at.sent[r];
            bases[LoggedPairs::key(spec_, channel, other, core_.self())] = at.received[r];
        }
        bases[{spec_.id, other, kResults}] = newest->base.next_seq - 1;  // resume() comes at the same place for all
    }
    bases[comm_.note_key(kAnswers)] = newest->base.messages.answers;
    comm_.log_->split(std::move(bases));
    comm_.log_->set_reading(false);
    return {};
}

Status Communicator::Checkpoints::damaged_marks() const {
    return Status::error(Code::LogCorrupt, "the marks of communicator " + spec_.name + " in the log are damaged");
}

ProgramPlace Communicator::Checkpoints::place() const {
    ProgramPlace p;
    p.next_seq = comm_.next_seq_;
    p.messages = comm_.pairs_->position();
    p.messages.quiet = p.messages.quiet && comm_.open_.empty() && (comm_.ring_ == nullptr || comm_.ring_->idle());
    if (comm_.ring_ != nullptr) {
        p.ring = comm_.ring_->pairs().position();
    } else {
        p.ring.sent = p.ring.received = std::vector<std::uint64_t>(spec_.members.size());
    }
    return p;
}

// L14: a mark is written after its agreement: so all that comes before it, the agreement's own all-gather included, is complete everywhere. A
// process that goes on from there will not take part in any of it again. L16: nor what comes before a note.
std::uint64_t Communicator::Checkpoints::proven() const {
    std::uint64_t seq = 0;
    if (core_.rules.l14)
        if (const auto newest = read_mark(core_.config.log->last(comm_.note_key(kMarks)))) seq = newest->place.next_seq - 1;
    if (core_.rules.l16)
        if (const auto usable = usable_notes(); !usable.empty()) seq = std::max(seq, usable.front().place.next_seq - 1);
    return seq;
}

Status Communicator::Checkpoints::at_resume_point(const Mark& mark, const ProgramPlace& here) const {
    if (here == mark.base) return {};
    return Status::error(Code::ReplayDiverged,
                         "before resume, this process has called " + std::to_string(here.next_seq - 1) +
                             " operations on communicator " + spec_.name + ", one before it " +
                             std::to_string(mark.base.next_seq - 1) +
                             " (or other messages): what comes before resume must be the same in every process");
}

// All ranks are here, or were when a process before this one came to this point. number: of the mark with that tag.
Status Communicator::Checkpoints::find_mark(const std::string& tag, const ProgramPlace& here, std::uint64_t* number) const {
    const auto last = core_.config.log->last(comm_.note_key(kMarks));
    *number = 1;
    if (last == 0)
        return tag.empty() ? Status{}
                           : Status::error(Code::Invalid, "there is no checkpoint \"" + tag + "\" in the log of communicator " +
                                                              spec_.name + ", which is empty: start without a tag");
    const auto newest = read_mark(last);
    if (!newest) return damaged_marks();
    if (auto s = at_resume_point(*newest, here); !s) return s;
    for (auto n = last; n > 0; --n) {
        const auto m = read_mark(n);
        if (!m) break;
        if (m->tag != tag) continue;
        *number = n;
        return {};
    }
    return Status::error(Code::Invalid, (tag.empty() ? "what comes before the oldest checkpoint has been given up"
                                                     : "there is no checkpoint \"" + tag + "\" in the log") +
                                            std::string(" of communicator ") + spec_.name + "; there are: " + joined(tags()));
}

Status Communicator::Checkpoints::go_on_from(std::uint64_t number, const ProgramPlace& here) {
    pass_resume_point(number);
    if (core_.config.log->last(comm_.note_key(kMarks)) == 0) {
        const Mark mark{"", here, here};
        FT_POINT("checkpoint.resume");
        if (auto s = write_mark(mark); !s) return s;
        if (auto s = find_resume_point(); !s) return s;
        comm_.log_->set_reading(true);
        comm_.for_pairs([](LoggedPairs& pairs) { pairs.on_resume_point(); });
        return {};
    }
    const auto to = read_mark(number);
    if (!to) return damaged_marks();
    go_on_at(to->place);
    return {};
}

void Communicator::Checkpoints::go_on_at(const ProgramPlace& place, const LoggedPairs::Left& left) {
    comm_.next_seq_ = place.next_seq;
    comm_.done_seq_ = comm_.next_seq_ - 1;
    // Made before it may read on: what comes before this place may be gone, and it has not been told yet that it is not to look there.
    const auto& ring_sent = place.ring.sent;
    const bool with_ring =
        comm_.ring_ != nullptr || std::any_of(ring_sent.begin(), ring_sent.end(), [](auto n) { return n > 0; });
    if (with_ring) comm_.ring();
    comm_.log_->set_reading(true);
    comm_.pairs_->go_to(place.messages, left);
    if (with_ring) comm_.ring().pairs().go_to(place.ring);
    comm_.serve_logged();
}

// All ranks are at this checkpoint, with `acknowledged` marks written by each of them.
Status Communicator::Checkpoints::pass_checkpoint(const std::string& tag, const ProgramPlace& here, std::uint64_t acknowledged) {
    const auto key = comm_.note_key(kMarks);
    const auto number = marks_ + 1;
    if (number <= core_.config.log->last(key)) {  // done again
        const auto before = read_mark(number);
        if (!before || before->tag != tag || before->place.next_seq != here.next_seq)
            return Status::error(Code::ReplayDiverged, "checkpoint " + std::to_string(number - 1) + " was \"" +
                                                           (before ? before->tag : "?") + "\", and is now \"" + tag + "\"");
    } else {
        const auto first = read_mark(marks_);
        FT_CHECK(first.has_value(), "mark %llu is not in the log", static_cast<unsigned long long>(marks_));
        const Mark mark{tag, here, first->base};
        FT_POINT("checkpoint.mark.before");
        if (auto s = write_mark(mark); !s) return s;
        FT_POINT("checkpoint.mark.after");
    }
    marks_ = number;
    comm_.pairs_->count_anew(marks_);
    if (!core_.rules.l13) acknowledged = number;  // rule L13 switched off: "all have it, for I have it"
    return give_up_before(core_.rules.l4 ? acknowledged - 1 : acknowledged);
}

// From the mark `keep` on, everything stays.
Status Communicator::Checkpoints::give_up_before(std::uint64_t keep) {
    if (keep < 2) return {};  // the resume point stays until two checkpoints are there
    const auto old = read_mark(keep);
    if (!old) return {};  // before the last restart
    core_.host.trace("checkpoint.collect");
    FT_POINT("checkpoint.collect");
    comm_.pairs_->collect(old->place.messages);
    if (core_.config.log->last({spec_.id, core_.self(), kHeard, 1}) > 0) comm_.pairs_->forget_heard(keep);
    if (comm_.ring_ != nullptr) comm_.ring_->pairs().collect(old->place.ring);
    comm_.pairs_->forget_answers(keep);
    if (auto s = comm_.log_->collect(comm_.note_key(kAnswers), old->place.messages.answers); !s) return s;
    if (auto s = comm_.log_->collect(comm_.note_key(kResults), old->place.next_seq - 1); !s) return s;
    return core_.config.log->collect(comm_.note_key(kMarks), keep - 1);
}

std::vector<std::string> Communicator::Checkpoints::tags() const {
    std::vector<std::string> out;
    auto last = core_.config.log->last(comm_.note_key(kMarks));
    for (const auto& [rank, offered] : offers_)
        if (marks_ == 0) last = std::min(last, offered);  // its log group goes on from one (G2)
    for (auto n = last; n > 1; --n) {
        const auto m = read_mark(n);
        if (!m) break;
        out.push_back(m->tag);
    }
    return out;
}

}  // namespace ftcomm
