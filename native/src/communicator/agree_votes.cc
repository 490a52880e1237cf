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
#include "communicator/agree.h"
#include "communicator/announce.h"
#include "communicator/same_votes.h"

namespace ftcomm {

void Communicator::Agreeing::send_vote() {
    if (!comm_.dead_end()) return;
    votes_[rank_] = mine_;
    sent_ = false;
    send_votes_on();
}

void Communicator::Agreeing::send_votes_on() {
    if (!comm_.dead_end()) return;
    const auto tree = comm_.voters();
    if (tree.lowest() == rank_) {
        try_to();
        return;
    }
    const auto seq = comm_.decision_.agree_seq + 1;
    if (sent_ || !tree.has(rank_)) return;
    const auto place = place_in_tree(tree, rank_, core_.config.spread_degree);
    SameVotes<Vote> votes;
    for (int r : place.part.list()) {
        const auto it = votes_.find(r);
        if (it == votes_.end() || it->second.seq != seq) return;
        votes.add(r, it->second);
    }
    sent_ = true;
    ByteWriter w;
    w.put(seq).put(votes.count());
    for (const auto& [vote, ranks] : votes.list()) w.put(vote.kind).put(vote.flag).ranks(vote.acked).ranks(ranks);
    FT_POINT("agree.vote");
    comm_.announcements_->send_votes(place.parent, FrameKind::AgreeVote, w.take());
}

void Communicator::Agreeing::on_votes(int from, std::uint64_t epoch, ByteView body) {
    if (!comm_.announcements_->are_of_this_view(from, FrameKind::AgreeVote, epoch, body)) return;
    ByteReader r(body);
    const auto seq = r.get<std::uint64_t>();
    for (auto n = r.count(11); n > 0 && r.ok(); --n) {
        Vote vote{seq, r.get<AgreeKind>(), r.get<std::int64_t>(), {}};
        vote.acked = r.ranks();
        for (int rank : (r.ranks() & comm_.in_view()).list()) on_vote(rank, vote);
    }
    FT_CHECK(r.done(), "undecodable agree votes from rank %d", from);
    send_votes_on();
}

void Communicator::Agreeing::on_vote(int rank, const Vote& vote) {
    if (vote.seq <= comm_.decision_.agree_seq) {
        comm_.announcements_->answer(rank, FrameKind::AgreeResult);
        return;
    }
    auto& known = votes_[rank];
    if (known.seq > vote.seq) return;
    known = vote;
    // Somebody has a result that this rank has not. It is on its way, unless there was a death; then it is the leader who has to find out.
    if (vote.seq > comm_.decision_.agree_seq + 1 && comm_.leader() == rank_) comm_.read_cell();
}

}  // namespace ftcomm
