// Messages when ranks are gone: what ends, and what a receive from ANY makes of it.
#include "communicator/p2p.h"

namespace ftcomm {

Status message_too_long(std::uint64_t bytes, int src, std::uint64_t capacity) {
    return Status::error(Code::Truncated, "a message of " + std::to_string(bytes) + " bytes from rank " + std::to_string(src) +
                                              " does not fit the receive buffer of " + std::to_string(capacity) + " bytes");
}

Status no_message(int src, std::int64_t tag) {
    auto s = Status::error(Code::Timeout, "Timed out: no message came from rank " +
                                              (src < 0 ? std::string("ANY") : std::to_string(src)) +
                                              (tag == kAnyTag ? "" : " with tag " + std::to_string(tag)));
    if (src >= 0) s.ranks = {src};
    return s;
}

Status PointToPoint::gone_status(const RankSet& ranks) const {
    Status s;
    s.code = Code::PeerFailure;
    s.ranks = ranks.list();
    for (int rank : s.ranks) {
        const auto it = evidence_.find(rank);
        s.evidence.push_back(it == evidence_.end() ? Evidence::None : it->second);
        s.message +=
            (s.message.empty() ? "rank " : ", rank ") + std::to_string(rank) + " is gone (" + to_string(s.evidence.back()) + ")";
    }
    s.message += " since epoch " + std::to_string(core_.view.epoch);
    s.epoch = core_.view.epoch;
    s.operation = "point-to-point in communicator " + spec_.name;
    return s;
}

void PointToPoint::on_failures(const RankSet& gone, const RankSet& acked, const std::map<int, Evidence>& evidence) {
    gone_ = gone;
    acked_ = acked;
    evidence_ = evidence;
    for (const auto& [rank, what] : evidence)
        if (what == Evidence::Left) left_.add(rank);
    for (auto it = sends_.begin(); it != sends_.end();) {
        if (gone_.has(it->dst)) {
            it = end(it, gone_status(RankSet::of({it->dst})));
        } else {
            ++it;
        }
    }
    // What had arrived whole before the death stays readable; without its data it is lost.
    std::erase_if(arrived_, [&](const Arrived& a) { return a.data.size() < a.bytes && gone_.has(a.src); });
    for (auto it = recvs_.begin(); it != recvs_.end();) {
        bool finished = false;
        if (it->src >= 0 && gone_.has(it->src)) {
            core_.finish(it->request, gone_status(RankSet::of({it->src})));
            finished = true;
        } else if (it->matched >= 0 && gone_.has(it->matched)) {  // from ANY: another one may send
            finished = match_again(*it);
        }
        it = finished ? recvs_.erase(it) : std::next(it);
    }
    check_alarms();
}

// Receives from ANY. A rank that has left is no failure (Q) as long as another one may still send; when none is left, waiting would
// never end.
void PointToPoint::check_alarms() {
    auto others = RankSet::first(static_cast<int>(spec_.members.size()));
    others.remove(rank_);
    const bool alone = !others.empty() && (others - gone_).empty();
    const auto unknown = alone ? others : gone_ - acked_ - left_;
    for (auto it = recvs_.begin(); it != recvs_.end();) {
        auto& request = it->request;
        const bool alarm = it->src < 0 && it->matched < 0 && !unknown.empty();
        if (alarm && (alone || it->src == kAnyOrFail)) {
            auto why = gone_status(unknown);
            why.message += alone ? "; nobody is left who could send (messages to oneself need one's own rank as the source)"
                                 : "; any of them may be the awaited sender: acknowledge with ack_failed() and receive again";
            request->alarmed = false;
            core_.finish(request, std::move(why));
            it = recvs_.erase(it);
            continue;
        }
        if (alarm && !request->alarmed) {
            request->alarm = gone_status(unknown);
            request->alarm.message += "; the receive from ANY stays pending: acknowledge with ack_failed() and wait again";
            request->alarmed = true;
            core_.host.completed(request);  // wakes the waiter; `done` stays false
        } else if (!alarm) {
            request->alarmed = false;
        }
        ++it;
    }
}

void PointToPoint::on_left(int rank) {
    for (auto it = sends_.begin(); it != sends_.end();) {
        if (it->dst != rank) {
            ++it;
            continue;
        }
        evidence_[rank] = Evidence::Left;
        it = end(it, gone_status(RankSet::of({rank})));
    }
}

// This rank may learn of deaths and of the replacements at once: what waits for a predecessor ends here. Of all of them in one step, with those who
// are gone: what goes on without one of them must not turn to what another one had shown.
void PointToPoint::replaced(const RankSet& came, const RankSet& gone, const RankSet& acked,
                            const std::map<int, Evidence>& evidence) {
    for (int rank : came.list()) {
        next_number_.erase(rank);
        left_.remove(rank);
    }
    std::erase_if(arrived_, [&](const Arrived& a) { return came.has(a.src); });
    on_failures(gone | came, acked, evidence);
}

void PointToPoint::fail_all(const Status& status) {
    for (const auto& s : sends_)
        if (s.open && s.done < s.bytes && !core_.stale) give_up(s.dst, s.number);
    while (!sends_.empty()) end(sends_.begin(), status);
    for (const auto& r : recvs_)  // its sender need not wait until what will be thrown away is read
        if (r.shown.ticket != 0 && !core_.stale) answer(r.matched, r.number, kReceived);
    std::erase_if(arrived_, [](const Arrived& a) { return !a.large && a.data.size() < a.bytes; });  // the rest may be dropped
    for (auto& r : recvs_) core_.finish(r.request, status);
    recvs_.clear();
}

bool PointToPoint::waits_for(int rank) const {
    for (const auto& s : sends_)
        if (s.dst == rank) return true;
    for (const auto& r : recvs_)
        if (r.src == rank || r.matched == rank) return true;  // one from ANY goes on without those who left
    return false;
}

}  // namespace ftcomm
