// Notes: a rank writes down, by itself, where its program is, so that its replacement can go on from there with a state that somebody else
// has: that of a replica, say. A checkpoint needs all ranks; a note needs nobody, and what comes before it stays in the log.
//
// L16: whoever goes on from a note does nothing again of what comes before it. So all of that must be in the log: a send that was logged late
// and lost with the process would never be made, and such a note does not count. And this process has returned from every operation before it,
// which it therefore answers for, as its predecessor did: it may be the only one that has the last one's result.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/failpoint.h"
#include "communicator/checkpoints.h"

namespace ftcomm {

namespace {

constexpr std::uint64_t kKept = 4;

}  // namespace

Status Communicator::Checkpoints::note(const std::string& tag) {
    const auto refused = [&](const std::string& why) {
        return Status::error(Code::Invalid, "note " + tag + " on communicator " + spec_.name + ": " + why);
    };
    // Whoever is voted out has been given up on by its operations, and has not returned from the last one.
    if (auto s = comm_.dead_end(); !s || comm_.closed_) return s ? refused("it is closed") : s;
    if (marks_ == 0) return refused("call resume() first");
    if (const auto names = used_elsewhere(); !names.empty())
        return refused("communicators that have no resume point of their own have been used" + names + ". " + kHearsAgain);
    if (!others_of_group().empty()) return refused("messages inside a log group are in no log: use checkpoints");
    const auto here = place();
    if (!here.messages.quiet || agreement_ != nullptr || (comm_.ring_ != nullptr && comm_.ring_->has_failed()))
        return refused("an operation is open, or has failed. Wait for all requests first");
    if (comm_.pairs_->has_refused()) return refused("the log had no room for a message. Send it, or take a checkpoint");
    if (!comm_.failures_->all_noted()) return refused("an operation has failed, and the log has no room to say so");
    auto& log = *core_.config.log;
    const auto key = comm_.note_key(kNotes);
    if (LogRecord record; !noted_) noted_ = log.last(key) > 0 && log.find(key, log.last(key), &record) ? record.aux : 0;
    // One rank's places come one after another, so one number tells them apart.
    auto so_far = here.next_seq;
    for (const auto* position : {&here.messages, &here.ring})
        for (const auto* counts : {&position->sent, &position->received})
            so_far = std::accumulate(counts->begin(), counts->end(), so_far);
    if (so_far < *noted_ || (so_far == *noted_ && has_noted(tag))) return {};  // done again
    const Note note{tag, marks_, here, comm_.pairs_->left(), comm_.pairs_->asks()};
    const auto bytes = note.encode();
    const ByteView parts[] = {bytes};
    FT_POINT("note.before");
    if (auto s = log.append(key, 0, so_far, parts); !s) return s;
    FT_POINT("note.after");
    noted_ = so_far;
    const auto last = log.last(key);
    return last > kKept ? log.collect(key, last - kKept) : Status{};
}

bool Communicator::Checkpoints::has_noted(const std::string& tag) const {
    auto& log = *core_.config.log;
    const auto key = comm_.note_key(kNotes);
    LogRecord record;
    for (auto n = log.last(key); n > 0 && n >= log.first(key) && log.find(key, n, &record); --n)
        if (const auto note = Note::decode(record.payload); note && note->tag == tag) return true;
    return false;
}

// Of those that were made since the newest mark: who goes on from an older one might look for what has been given up.
std::vector<Note> Communicator::Checkpoints::usable_notes() const {
    std::vector<Note> out;
    auto& log = *core_.config.log;
    const auto key = comm_.note_key(kNotes);
    if (!others_of_group().empty() || !log.state(key)) return out;
    const auto marks = log.last(comm_.note_key(kMarks));
    LogRecord record;
    for (auto n = log.last(key); n > 0 && n >= log.first(key) && log.find(key, n, &record); --n) {
        auto note = Note::decode(record.payload);
        if (!note || note->marks != marks || note->left.size() != spec_.members.size()) break;
        if (!core_.rules.l16 || has_all_before(*note)) out.push_back(std::move(*note));
    }
    return out;
}

bool Communicator::Checkpoints::has_all_before(const Note& note) const {
    const auto& place = note.place;
    if (comm_.log_->last(comm_.note_key(kResults)) + 1 < place.next_seq) return false;
    if (place.next_seq > 1 && !comm_.results_->is_whole(place.next_seq - 1)) return false;  // this rank could not hand it out
    if (comm_.log_->last(comm_.note_key(kAnswers)) < place.messages.answers) return false;
    for (std::size_t r = 0; r < spec_.members.size(); ++r) {
        const int other = spec_.members[r];
        for (auto channel : {LoggedPairs::Channel::Messages, LoggedPairs::Channel::Ring}) {
            const auto& at = channel == LoggedPairs::Channel::Messages ? place.messages : place.ring;
            if (comm_.log_->last(LoggedPairs::key(spec_, channel, core_.self(), other)) < at.sent[r]) return false;
            const auto came = at.received[r] + (channel == LoggedPairs::Channel::Messages ? note.left[r].size() : 0);
            if (comm_.log_->last(LoggedPairs::key(spec_, channel, other, core_.self())) < came) return false;
        }
    }
    return true;
}

std::vector<std::string> Communicator::Checkpoints::notes() const {
    std::vector<std::string> out;
    if (comm_.restore_ != nullptr) return out;
    for (auto& note : usable_notes())
        if (marks_ > 0 || note.place.next_seq - 1 <= comm_.served_ || !core_.rules.l16) out.push_back(std::move(note.tag));
    return out;
}

Status Communicator::Checkpoints::go_on_from_note(const std::string& tag, const ProgramPlace& here) {
    const auto last = core_.config.log->last(comm_.note_key(kMarks));
    const auto newest = read_mark(last);
    if (last > 0 && !newest) return damaged_marks();
    if (newest)
        if (auto s = at_resume_point(*newest, here); !s) return s;
    for (const auto& note : usable_notes()) {
        // One that did not hold when this process began is not what it has voted by.
        if (note.tag != tag || (core_.rules.l16 && note.place.next_seq - 1 > comm_.served_)) continue;
        pass_resume_point(note.marks);
        comm_.pairs_->count_on(note.asked);
        go_on_at(note.place, note.left);
        return {};
    }
    return Status::error(Code::Invalid, "there is no note \"" + tag + "\" in the log of communicator " + spec_.name);
}

}  // namespace ftcomm
