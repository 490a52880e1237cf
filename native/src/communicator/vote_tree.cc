#include "communicator/vote_tree.h"

#include "base/check.h"
#include "base/failpoint.h"
#include "channel/spread.h"
#include "communicator/announce.h"
#include "communicator/same_votes.h"

namespace ftcomm {

namespace {
constexpr int kPatience = 2, kStuck = 20;  // ticks
}

bool Communicator::VoteTree::is_used() const { return !comm_.replays() && core_.config.has_vote_trees(comm_.voters().count()); }

bool Communicator::VoteTree::has_vote_of_this_view(int rank) const {
    const auto* vote = comm_.ballot_.find(rank, comm_.attempt_ + 1);
    return vote != nullptr && vote->view_epoch == core_.view.epoch;
}

void Communicator::VoteTree::send_on() {
    if (!comm_.frozen_ || !comm_.dead_end() || !is_used()) return;
    const auto tree = comm_.voters();
    if (tree.lowest() == comm_.rank_ || !tree.has(comm_.rank_) || sent_ == now()) return;
    const auto place = place_in_tree(tree, comm_.rank_, core_.config.spread_degree);
    for (int r : place.part.list())
        if (!has_vote_of_this_view(r)) return;
    sent_ = now();
    send(place.parent, place.part);
}

void Communicator::VoteTree::send(int to, const RankSet& ranks) {
    SameVotes<Bytes> votes;
    for (int r : ranks.list()) {
        ByteWriter w;
        comm_.ballot_.find(r, comm_.attempt_ + 1)->encode(w);
        votes.add(r, w.take());
    }
    ByteWriter w;
    w.put(votes.count());
    for (const auto& [vote, from] : votes.list()) w.ranks(from).bytes(vote);
    FT_POINT("vote.send");
    comm_.announcements_->send_votes(to, FrameKind::Votes, w.take());
}

void Communicator::VoteTree::on_votes(int from, std::uint64_t epoch, ByteView body) {
    if (!comm_.announcements_->are_of_this_view(from, FrameKind::Votes, epoch, body)) return;
    const auto attempt = comm_.attempt_;
    ByteReader r(body);
    RankSet late;
    bool ahead = false, counts = false;
    for (auto n = r.count(8); n > 0 && r.ok(); --n) {
        const auto ranks = r.ranks() & comm_.in_view();
        const auto bytes = r.bytes();
        ByteReader one(bytes);
        const auto vote = Vote::decode(one);
        FT_CHECK(vote.has_value(), "an undecodable vote from rank %d", from);
        if (vote->attempt <= attempt) {
            late = late | ranks;
            continue;
        }
        ahead |= vote->attempt > attempt + 1;
        counts |= vote->attempt == attempt + 1;
        for (int rank : ranks.list()) comm_.ballot_.take_passed_on(rank, *vote);
    }
    FT_CHECK(r.done(), "undecodable votes from rank %d", from);
    if (!late.empty() && !comm_.record_.empty())  // they have missed it
        comm_.announcements_->spread_to(late, FrameKind::Decision, comm_.record_);
    if (ahead) {
        core_.host.trace("vote.ahead");
        comm_.read_cell();
    }
    if (!counts) return;
    if (!comm_.frozen_) {
        comm_.freeze();
        comm_.send_vote();
    }
    if (comm_.leader() == comm_.rank_) comm_.try_decide();
    else send_on();
}

void Communicator::VoteTree::on_tick() {
    if (waited_ != now()) {
        waited_ = now();
        waited_ticks_ = 0;
    }
    if (!comm_.frozen_ || !comm_.dead_end() || !is_used()) return;
    const int to = comm_.leader();
    if (to < 0 || to == comm_.rank_) return;
    // Whatever has happened to the tree (a rank that lags behind may have sent to one that is out; views may change faster than votes come
    // up): a plain vote counts in any view.
    const auto* own = comm_.ballot_.find(comm_.rank_, comm_.attempt_ + 1);
    if (++frozen_ticks_ % kStuck == 0 && own != nullptr) {
        core_.host.trace("vote.straight");
        comm_.send_vote_straight(to, *own);
        return;
    }
    if (sent_ == now() || !has_vote_of_this_view(comm_.rank_) || ++waited_ticks_ != kPatience) return;
    core_.host.trace("votes.hurried");
    RankSet mine;
    for (int r : comm_.ballot_.voters(comm_.attempt_ + 1).list())
        if (has_vote_of_this_view(r)) mine.add(r);
    send(to, mine);
}

}  // namespace ftcomm
