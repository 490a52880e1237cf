// How the votes for an agree or shrink come to the leader: along a tree of the voters, each rank's with those of all that are below it. No
// vote is lost in others on its way: those that are the same share an entry. A rank sends its part once it has all of it.
//
// The tree is that of a view, and votes count in the view that they were sent in (M17): a rank that lags behind keeps them until it has the
// view, and one that is ahead leaves them aside, because whoever waits sends again with each new view, to whoever is above it then. So the
// death of a rank on the way loses nothing, and no vote of a process before a replacement counts for it. Nor of those who have the result and
// do not vote again: they voted for the same attempt, and the death of a member ends that with a decision, which brings the result to all.
#include "base/check.h"
#include "base/failpoint.h"
#include "channel/spread.h"
#include "communicator/communicator.h"
#include "communicator/same_votes.h"

namespace ftcomm {

void Communicator::send_agree_vote() {
    if (!dead_end()) return;
    agree_votes_[rank_] = agree_.vote;
    agree_votes_sent_ = false;
    send_agree_votes_on();
}

void Communicator::send_agree_votes_on() {
    if (!dead_end()) return;
    const auto tree = voters();
    if (tree.lowest() == rank_) {
        try_agree();
        return;
    }
    const auto seq = decision_.agree_seq + 1;
    if (agree_votes_sent_ || !tree.has(rank_)) return;
    const auto place = place_in_tree(tree, rank_, core_.config.spread_degree);
    SameVotes<AgreeVote> votes;
    for (int r : place.part.list()) {
        const auto it = agree_votes_.find(r);
        if (it == agree_votes_.end() || it->second.seq != seq) return;
        votes.add(r, it->second);
    }
    agree_votes_sent_ = true;
    ByteWriter w;
    w.put(seq).put(votes.count());
    for (const auto& [vote, ranks] : votes.list()) w.put(vote.kind).put(vote.flag).ranks(vote.acked).ranks(ranks);
    FT_POINT("agree.vote");
    send_in_view(place.parent, FrameKind::AgreeVote, w.take());
}

// Votes that come along a tree, those after a death (vote_tree.cc), too.
void Communicator::send_in_view(int to, FrameKind kind, const Bytes& votes) {
    auto header = control(kind);
    header.aux = core_.view.epoch;
    core_.sender.send_long(spec_.members[static_cast<std::size_t>(to)], header, spec_and(votes));
}

// M17. False: they are kept until this rank has their view, or their sender is told this one, and sends them again.
bool Communicator::are_of_this_view(int from, FrameKind kind, std::uint64_t epoch, ByteView votes) {
    if (epoch == core_.view.epoch || !core_.rules.m17) return true;
    const bool agree = kind == FrameKind::AgreeVote;
    if (epoch > core_.view.epoch) {
        core_.host.trace(agree ? "agree.votes_held" : "votes.held");
        held_votes_.push_back({from, kind, epoch, Bytes(votes.begin(), votes.end())});
    } else {
        core_.host.trace(agree ? "agree.votes_outdated" : "votes.outdated");
        // Whoever was to pass it on may have ended; as may the sender of what was held.
        if (in_view().has(from)) core_.tell_view(spec_.members[static_cast<std::size_t>(from)]);
    }
    return false;
}

void Communicator::on_agree_votes(int from, std::uint64_t epoch, ByteView body) {
    if (!are_of_this_view(from, FrameKind::AgreeVote, epoch, body)) return;
    ByteReader r(body);
    const auto seq = r.get<std::uint64_t>();
    for (auto n = r.count(11); n > 0 && r.ok(); --n) {
        AgreeVote vote{seq, r.get<AgreeKind>(), r.get<std::int64_t>(), {}};
        vote.acked = r.ranks();
        for (int rank : (r.ranks() & in_view()).list()) on_agree_vote(rank, vote);
    }
    FT_CHECK(r.done(), "undecodable agree votes from rank %d", from);
    send_agree_votes_on();
}

// Whoever sent them may have gone meanwhile: they are others' votes, too, and those are here.
void Communicator::take_held_votes() {
    std::vector<HeldVotes> held;
    held.swap(held_votes_);
    for (const auto& h : held) {
        if (h.kind == FrameKind::Votes) on_votes(h.from, h.epoch, h.body);
        else on_agree_votes(h.from, h.epoch, h.body);
    }
}

void Communicator::on_agree_vote(int rank, const AgreeVote& vote) {
    if (vote.seq <= decision_.agree_seq) {
        answer_with_record(rank, FrameKind::AgreeResult);
        return;
    }
    auto& known = agree_votes_[rank];
    if (known.seq > vote.seq) return;
    known = vote;
    // Somebody has a result that this rank has not. It is on its way, unless there was a death; then it is the leader who has to find out.
    if (vote.seq > decision_.agree_seq + 1 && leader() == rank_) read_cell();
}

}  // namespace ftcomm
