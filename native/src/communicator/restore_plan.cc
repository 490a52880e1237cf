// Which records are needed of whom, what cannot be had, and how the new log comes to look like the lost one.
#include <algorithm>
#include <cstring>

#include "base/failpoint.h"
#include "communicator/checkpoints.h"
#include "communicator/lost_logs.h"
#include "communicator/restore.h"

namespace ftcomm {

namespace {

Status missing(std::string what) { return Status::error(Code::LogCorrupt, std::move(what)); }

}  // namespace

// All ranks have said how they stand.
Status Communicator::Restore::plan() {
    Mark base, oldest;
    if (auto s = check_others_that_lost(); !s) return s;
    if (auto s = find_marks(&first_mark_, &last_mark_, &base); !s) return s;
    if (first_mark_ > 0) oldest = mark_at(first_mark_);
    base_seq_ = first_mark_ > 0 ? base.place.next_seq - 1 : 0;
    std::uint64_t logged = 0;
    for (int r = 0; r < size(); ++r) {
        if (r == comm_.rank_) continue;
        const auto& s = *peer(r).state;
        if (auto why = check_fellow(r); !why) return why;
        if (!s.readable)
            if (auto why = plan_messages(r, first_mark_ > 0 ? &base : nullptr, first_mark_ > 0 ? &oldest : nullptr); !why)
                return why;
        complete_ = std::max(complete_, s.done);
        // A fellow may share its results with the process that is lost.
        if (s.logged > logged || (s.logged == logged && (source_ < 0 || !s.readable))) {
            logged = s.logged;
            source_ = r;
        }
    }
    if (source_ < 0 || logged == 0) return {};
    // Operations run one after another; and one without a fence that nobody has any more is done again.
    complete_ = std::clamp(complete_, logged - 1, logged);
    auto& p = peer(source_);
    const LogKey results{comm_.spec_.id, comm_.core_.self(), kResults};
    auto later = results;
    later.part = 1;
    const auto& last = p.state->last[static_cast<std::size_t>(LostStream::Results)];
    p.copies.push_back({LostStream::Results, 0, results, 0, last[0]});
    if (first_mark_ > 0)
        p.copies.push_back({LostStream::Results, 1, later, oldest.place.next_seq - base.place.next_seq, last[1]});
    return {};
}

// Of what two have lost nothing can be had again; of a communicator that is new nothing was there. That it is new is believed only
// as long as nobody has anything of it.
Status Communicator::Restore::check_others_that_lost() {
    int lost = -1;
    bool history = false;
    for (int r = 0; r < size(); ++r) {
        if (r == comm_.rank_) continue;
        if (peer(r).state->lost) lost = r;
        history |= peer(r).state->has_history();
    }
    return lost >= 0 && history ? missing(lost_both(lost)) : Status{};
}

// Checkpoints that all other ranks have, and behind all that this one was told and nobody else was.
Status Communicator::Restore::find_marks(std::uint64_t* oldest, std::uint64_t* newest, Mark* base) {
    std::uint64_t first = 1, last = ~std::uint64_t{0}, answers = 0;
    bool early = false;
    for (int r = 0; r < size(); ++r) {
        if (r == comm_.rank_) continue;
        const auto& s = *peer(r).state;
        first = std::max(first, s.first_mark);
        last = std::min(last, s.last_mark());
        early |= s.early_answers;
        answers = std::max(answers, s.newest_answers);
    }
    const bool none = size() == 1 || last == 0;
    if (early || (answers > 0 && (none || answers >= last)))
        return missing(
            std::string("since ") + (early || none ? "the start" : "the last checkpoint that all ranks have") +
            " it has received from ANY, or given up a receive (a timeout, a cancel): which source it was given, and that it "
            "gave up, was in its log only");
    *oldest = *newest = 0;
    if (none) return {};
    first = std::max(first, answers + 1);
    if (first > last) return missing("there is no checkpoint that all other ranks have in their logs");
    for (int r = 0; r < size(); ++r) {
        if (r == comm_.rank_) continue;
        const auto& s = *peer(r).state;
        for (auto n = first; n <= last; ++n)
            if (!Mark::decode(s.marks[n - s.first_mark]))
                return missing("the marks in the log of rank " + std::to_string(r) + " are damaged");
    }
    *oldest = first;
    *newest = last;
    *base = mark_at(first);
    base->place = base->base;
    return {};
}

// What this rank's mark said, from the others': each message that was sent was received then (L3).
Mark Communicator::Restore::mark_at(std::uint64_t number) const {
    Mark out;
    const auto n = peers_.size(), me = static_cast<std::size_t>(comm_.rank_);
    for (auto* place : {&out.place, &out.base})
        for (auto* pairs : {&place->messages, &place->ring}) {
            pairs->sent.assign(n, 0);
            pairs->received.assign(n, 0);
        }
    for (std::size_t r = 0; r < n; ++r) {
        if (r == me) continue;
        const auto& s = *peers_[r].state;
        const auto theirs = *Mark::decode(s.marks[number - s.first_mark]);
        out.tag = theirs.tag;
        for (auto [mine, other] : {std::pair(&out.place, &theirs.place), std::pair(&out.base, &theirs.base)}) {
            mine->next_seq = other->next_seq;
            for (auto [to, from] : {std::pair(&mine->messages, &other->messages), std::pair(&mine->ring, &other->ring)}) {
                to->sent[r] = from->received[me];
                to->received[r] = from->sent[me];
            }
        }
    }
    return out;
}

// Another host's: what it has sent, and what it has received. From the oldest checkpoint on; what comes before the resume point, all.
Status Communicator::Restore::plan_messages(int rank, const Mark* base, const Mark* oldest) {
    auto& p = peer(rank);
    const auto r = static_cast<std::size_t>(rank);
    const int self = comm_.core_.self(), other = comm_.slot_of(rank);
    for (auto stream : {LostStream::Received, LostStream::Sent, LostStream::RingReceived, LostStream::RingSent}) {
        const auto& last = p.state->last[static_cast<std::size_t>(stream)];
        const bool ring = stream == LostStream::RingReceived || stream == LostStream::RingSent;
        const bool sent = stream == LostStream::Sent || stream == LostStream::RingSent;
        const auto count = [&](const ProgramPlace& place) {
            const auto& pairs = ring ? place.ring : place.messages;
            return sent ? pairs.sent[r] : pairs.received[r];
        };
        if (base == nullptr) {
            if (last[0] > 0) p.copies.push_back({stream, 0, comm_.lost_logs_->key_of(stream, 0, self, other), 0, last[0]});
            continue;
        }
        const auto before = count(base->base), skip = count(oldest->place) - before;
        if (last[0] < before)
            return missing("rank " + std::to_string(rank) + " has " + std::to_string(last[0]) + " of " + std::to_string(before) +
                           " messages from before the resume point");
        if (before > 0) p.copies.push_back({stream, 0, comm_.lost_logs_->key_of(stream, 0, self, other), 0, before});
        if (skip > 0 || last[1] > 0)
            p.copies.push_back({stream, 1, comm_.lost_logs_->key_of(stream, 1, self, other), skip, last[1]});
    }
    return {};
}

// Between ranks of one host the record is the message: there is one copy, and it is where this rank's log was.
Status Communicator::Restore::check_fellow(int rank) {
    const auto& s = *peer(rank).state;
    if (s.readable != log().readable(comm_.slot_of(rank)))
        return missing(s.readable
                           ? "it was on the host of rank " + std::to_string(rank) +
                                 ", which shares memory with it and cannot reach it here. A rank can be moved if it is alone "
                                 "on its host"
                           : "it is on the host of rank " + std::to_string(rank) +
                                 " now, and was not: start it on a host of its own");
    if (!s.readable) return {};
    for (auto stream : {LostStream::Sent, LostStream::RingSent})
        for (int part : {0, 1})
            if (s.last[static_cast<std::size_t>(stream)][static_cast<std::size_t>(part)] >
                log().last(comm_.lost_logs_->key_of(stream, part, comm_.core_.self(), comm_.slot_of(rank))))
                return missing("its messages to rank " + std::to_string(rank) + ", on the same host, were in its log only");
    return {};
}

// The log is as it was. The marks come last: with them a process finds its log in two parts.
Status Communicator::Restore::finish() {
    if (auto s = log().flush(); !s) return s;
    if (first_mark_ > 0) {
        if (auto s = check_own_messages(); !s) return s;
        const auto key = comm_.note_key(kMarks);
        if (log().last(key) < first_mark_ - 1)
            if (auto s = log().skip(key, first_mark_ - 1); !s) return s;
        for (auto n = log().last(key) + 1; n <= last_mark_; ++n)
            if (auto s = comm_.checkpoints_->append_mark(mark_at(n)); !s) return s;
    }
    FT_POINT("restore.done");
    comm_.lost_logs_->note(static_cast<std::size_t>(comm_.rank_), comm_.core_.config.incarnation);
    return comm_.core_.abandoned;
}

// Those after the resume point are sent again. Those before it have their place in the part of the log that is there already.
Status Communicator::Restore::check_own_messages() {
    if (base_seq_ == 0) return {};
    const auto n = peers_.size(), me = static_cast<std::size_t>(comm_.rank_);
    LogRecord record;  // of the agreement on the resume point: what all ranks had sent then
    if (auto s = log().find(comm_.note_key(kResults), base_seq_, &record); !s) return s;
    const auto width = kAgreementCounts + 2 * n;
    const auto at = ResultStream::kHead + sizeof(std::int64_t) * (me * width + kAgreementCounts + me);
    std::int64_t own = 0;
    if (record.payload.size() != ResultStream::kHead + sizeof own * width * n)
        return missing("the resume point is damaged in the log of rank " + std::to_string(source_));
    std::memcpy(&own, record.payload.data() + at, sizeof own);
    return own == 0 ? Status{} : missing("it has sent messages to itself before the resume point, which were in its log only");
}

}  // namespace ftcomm
