// agree and shrink on one communicator: every living member's word, one compare-and-set, then the announcement. They work on broken and revoked
// communicators, and touch no operation. (ULFM: Bland et al. 2013; here the head cell takes the place of a consensus protocol.)
#pragma once

#include <map>

#include "communicator/communicator.h"

namespace ftcomm {

class Communicator::Agreeing {
public:
    explicit Agreeing(Communicator& comm) : comm_(comm), core_(comm.core_), spec_(comm.spec_), rank_(comm.rank_) {}

    RequestPtr post(AgreeKind kind, std::int64_t flag);
    bool is_open() const { return request_ != nullptr; }
    bool waits_for_admission() const { return held_; }
    bool has(const RequestPtr& request) const { return request != nullptr && request_ == request; }

    void on_votes(int from, std::uint64_t epoch, ByteView body);
    void on_view();
    void on_replaced(int rank) { votes_.erase(rank); }  // its predecessor's
    void resume();  // an admission has ended
    void try_to();  // as the leader, once all have voted
    void finish();  // the decision that this rank has come to carries the next result
    void fail(const Status& status);

private:
    struct Vote {
        std::uint64_t seq = 0;
        AgreeKind kind = AgreeKind::Agree;
        std::int64_t flag = 0;
        RankSet acked;
        bool operator==(const Vote&) const = default;
    };
    // agree_votes.cc
    void send_vote();
    void send_votes_on();
    void on_vote(int rank, const Vote& vote);

    Communicator& comm_;
    Core& core_;
    const CommSpec& spec_;
    const int rank_;
    RequestPtr request_;  // of the one that this rank has posted; null: none
    bool held_ = false;  // posted during an admission: it begins after that, with the newcomers (M13)
    Vote mine_;
    std::map<int, Vote> votes_;
    bool sent_ = false;  // this rank's and those that come through it, since the last change of the view
};

}  // namespace ftcomm
