// How the votes after a death come to the leader where voters are many: as those for an agree (agree_votes.cc), along the tree of a view, each
// rank's with those of all that are below it, and in the view that they were sent in (M17). Who wishes for something, or has found out that others
// do something else, sends its vote straight to the leader as well, which may not know yet that there is something to decide.
//
// Who waits for those below for long does so, too, with what it has: they may not have made the communicator, and the leader calls them. (Where
// all know of a death from the view, nobody waits.) Under replay votes go straight: a rank that asks for its lost log takes its vote back.
#include "base/check.h"
#include "base/failpoint.h"
#include "channel/spread.h"
#include "communicator/agree.h"
#include "communicator/same_votes.h"

namespace ftcomm {

namespace {
constexpr int kPatience = 2, kStuck = 20;  // ticks
}

bool Communicator::votes_by_tree() const { return !replays() && core_.config.has_vote_trees(voters().count()); }

bool Communicator::has_vote_of_this_view(int rank) const {
    const auto it = votes_.find(rank);
    return it != votes_.end() && it->second.attempt == attempt_ + 1 && it->second.view_epoch == core_.view.epoch;
}

void Communicator::send_votes_on() {
    if (!frozen_ || !dead_end() || !votes_by_tree()) return;
    const auto tree = voters();
    const std::pair now(core_.view.epoch, attempt_ + 1);
    if (tree.lowest() == rank_ || !tree.has(rank_) || votes_sent_ == now) return;
    const auto place = place_in_tree(tree, rank_, core_.config.spread_degree);
    for (int r : place.part.list())
        if (!has_vote_of_this_view(r)) return;
    votes_sent_ = now;
    send_votes(place.parent, place.part);
}

void Communicator::send_votes(int to, const RankSet& ranks) {
    SameVotes<Bytes> votes;
    for (int r : ranks.list()) {
        ByteWriter w;
        votes_[r].encode(w);
        votes.add(r, w.take());
    }
    ByteWriter w;
    w.put(votes.count());
    for (const auto& [vote, from] : votes.list()) w.ranks(from).bytes(vote);
    FT_POINT("vote.send");
    send_in_view(to, FrameKind::Votes, w.take());
}

void Communicator::on_votes(int from, std::uint64_t epoch, ByteView body) {
    if (!are_of_this_view(from, FrameKind::Votes, epoch, body)) return;
    ByteReader r(body);
    RankSet late;
    bool ahead = false, counts = false;
    for (auto n = r.count(8); n > 0 && r.ok(); --n) {
        const auto ranks = r.ranks() & in_view();
        const auto bytes = r.bytes();
        ByteReader one(bytes);
        const auto vote = Vote::decode(one);
        FT_CHECK(vote.has_value(), "an undecodable vote from rank %d", from);
        if (vote->attempt <= attempt_) {
            late = late | ranks;
            continue;
        }
        ahead |= vote->attempt > attempt_ + 1;
        counts |= vote->attempt == attempt_ + 1;
        for (int rank : ranks.list()) {
            const auto it = votes_.find(rank);
            // What it has sent straight here since says more.
            if (it != votes_.end() && it->second.attempt == vote->attempt && it->second.proposals.size() > vote->proposals.size())
                continue;
            votes_[rank] = *vote;
        }
    }
    FT_CHECK(r.done(), "undecodable votes from rank %d", from);
    if (!late.empty() && !record_.empty()) spread_to(late, FrameKind::Decision, record_);  // they have missed it
    if (ahead) {
        core_.host.trace("vote.ahead");
        read_cell();
    }
    if (!counts) return;
    if (!frozen_) {
        freeze();
        send_vote();
    }
    if (leader() == rank_) try_decide();
    else send_votes_on();
}

// Votes that come along a tree, those for an agree, too.
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

// Whoever sent them may have gone meanwhile: they are others' votes, too, and those are here.
void Communicator::take_held_votes() {
    std::vector<HeldVotes> held;
    held.swap(held_votes_);
    for (const auto& h : held) {
        if (h.kind == FrameKind::Votes) on_votes(h.from, h.epoch, h.body);
        else agreeing_->on_votes(h.from, h.epoch, h.body);
    }
}

// With each tick.
void Communicator::hurry_votes() {
    const std::pair now(core_.view.epoch, attempt_ + 1);
    if (votes_waited_ != now) {
        votes_waited_ = now;
        vote_ticks_ = 0;
    }
    if (!frozen_ || !dead_end() || !votes_by_tree()) return;
    const int to = leader();
    if (to < 0 || to == rank_) return;
    // Whatever has happened to the tree (a rank that lags behind may have sent to one that is out; views may change faster than votes come
    // up): a plain vote counts in any view.
    const auto own = votes_.find(rank_);
    if (++frozen_ticks_ % kStuck == 0 && own != votes_.end() && own->second.attempt == attempt_ + 1) {
        core_.host.trace("vote.straight");
        send_vote_straight(to);
        return;
    }
    if (votes_sent_ == now || !has_vote_of_this_view(rank_) || ++vote_ticks_ != kPatience) return;
    core_.host.trace("votes.hurried");
    RankSet mine;
    for (const auto& [r, vote] : votes_)
        if (has_vote_of_this_view(r)) mine.add(r);
    send_votes(to, mine);
}

}  // namespace ftcomm
