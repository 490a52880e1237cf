// Why an operation fails, in words that say what to do.
#include <algorithm>

#include "base/check.h"
#include "base/joined.h"
#include "collectives/op_planner.h"

namespace ftcomm {

const char* advice_for(Policy policy) {
    if (policy == Policy::Replay) return "under the policy replay its replacement has to come back; it was given up";
    return policy == Policy::Raise ? "call shrink() to go on without it, or use policy=\"lossy\""
                                   : "this operation needs what only the dead rank had; others go on without it";
}

Cause peer_failure(const RankSet& dead, const std::map<int, Evidence>& evidence, std::uint64_t epoch, const char* advice) {
    Cause c;
    c.code = Code::PeerFailure;
    c.epoch = epoch;
    c.ranks = dead.list();
    const auto names = joined(c.ranks, ", ", [&](int r) {
        const auto it = evidence.find(r);
        c.evidence.push_back(it == evidence.end() ? Evidence::None : it->second);
        return std::to_string(r) + " (" + to_string(c.evidence.back()) + ")";
    });
    c.message = "rank " + names + " is gone since epoch " + std::to_string(epoch) + "; " + advice;
    return c;
}

std::optional<Cause> OpPlanner::disagreement(const std::vector<Standing>& standings) {
    const Standing* first = nullptr;
    Cause c;
    c.code = Code::Mismatch;
    c.epoch = in_.epoch;
    for (const auto& s : standings) {
        if (s.op == nullptr) continue;
        if (first == nullptr) {
            first = &s;
        } else if (s.op->shape.signature() != first->op->shape.signature()) {
            c.ranks.push_back(s.rank);
        }
    }
    bool proposed = false;
    for (const auto& [rank, vote] : in_.votes)
        for (const auto& x : vote.proposals) proposed |= first != nullptr && x.code == Code::Mismatch && x.seq == first->op->seq;
    if (first == nullptr || (c.ranks.empty() && !proposed)) return std::nullopt;
    if (c.ranks.empty() && first->op->shape.is_direct()) {  // counts are no part of what is compared: each pair finds them itself
        c.message = "ranks called " + first->op->shape.text() +
                    " with sizes that do not fit: what one rank gives another must be as much as that one takes. Compare the "
                    "counts (split sizes, or the sizes of the tensors in a list) of all ranks";
        return c;
    }
    c.message = "ranks called different operations at the same point:";
    for (const auto& s : standings)
        if (s.op != nullptr)
            c.message += (&s == first ? " rank " : "; rank ") + std::to_string(s.rank) + " called " + s.op->shape.text();
    c.message += ". Make every rank call the same collectives in the same order, with equal sizes and types";
    return c;
}

const Shape* OpPlanner::mixed_exchange(const std::vector<Standing>& standings) {
    const Shape* direct = nullptr;
    for (const auto& s : standings)
        if (s.op != nullptr && s.op->shape.kind == OpKind::AllToAll && s.op->shape.algorithm == Algorithm::Direct)
            direct = &s.op->shape;
    bool mixed = false;
    for (const auto& s : standings) {
        if (s.op == nullptr) continue;
        const bool same = direct != nullptr && s.op->shape.is_same_exchange(*direct);
        if (!same && (direct == nullptr || !(s.op->shape == *direct))) return nullptr;
        mixed |= same;
    }
    return mixed ? direct : nullptr;
}

std::optional<Cause> OpPlanner::proposed_failure(std::uint64_t seq, const std::vector<Standing>& standings, bool mixed) {
    Cause c;
    c.epoch = in_.epoch;
    std::vector<int> out_of_time;
    for (const auto& [rank, vote] : in_.votes) {
        for (const auto& x : vote.proposals) {
            if (x.seq != seq || (x.code == Code::Mismatch && mixed)) continue;
            // What could not be read may have been a dying process's: the repair shows whether the living can be read. Or frames bring it.
            if (x.code == kUnreadable && (frames_may_do() || !newly_dead_.empty())) continue;
            if (x.code == kNoWindow) continue;  // what runs in their place adds in the same order
            if (x.code == Code::Timeout) out_of_time.push_back(rank);
            if (x.code == Code::Timeout || c.code == Code::Ok) {
                if (x.code == Code::Timeout && c.code != Code::Timeout) c.ranks.clear();
                c.code = x.code;
            }
            if (x.code != Code::Timeout && c.code == x.code) c.ranks.push_back(rank);
        }
    }
    if (c.code == Code::Ok) return std::nullopt;
    if (c.code == Code::Timeout) {
        for (const auto& s : standings)
            if (s.state == Standing::State::NotEntered) c.ranks.push_back(s.rank);
        c.message = c.ranks.empty() ? "Timed out waiting for the operation, which all ranks have entered; raise the timeout"
                                    : "Timed out on rank " + joined(out_of_time) + ": rank " + joined(c.ranks) +
                                          " had not entered it by then, and is too late now. Look what it was doing, or raise "
                                          "the timeout";
        return c;
    }
    if (c.code == kUnreadable) {
        c.message =
            "this rank could not look into the memory of a living one (the kernel did not let it, though it had seemed to, or "
            "the host's shared memory segment is full: set "
            "FTCOMM_PEER_MEMORY=0 on all ranks), and under the policy replay sums must not come about in another way from here "
            "on; rank";
        for (auto r : c.ranks) c.message += " " + std::to_string(r);
        return c;
    }
    if (c.code == Code::ReplayDiverged || c.code == Code::LogCorrupt) {
        c.message = c.code == Code::LogCorrupt ? "an earlier result in the log is damaged on rank"
                                               : "it gave another result than when it was done before, on rank";
        for (auto r : c.ranks) c.message += " " + std::to_string(r);
        return c;
    }
    if (c.code == Code::LogFull) {
        c.message =
            "its result could not be logged (the log is full, or its files cannot be written; that rank says which, and what to "
            "do) on rank";
        for (auto r : c.ranks) c.message += " " + std::to_string(r);
        return c;
    }
    if (c.code == Code::Interrupted) c.code = Code::Cancelled;
    c.message = "given up (interrupted or cancelled) on rank";
    for (auto r : c.ranks) c.message += " " + std::to_string(r);
    return c;
}

bool OpPlanner::reads_are_refused() const { return frames_may_do() && newly_dead_.empty() && somebody_proposes(kUnreadable); }

bool OpPlanner::somebody_proposes(Code code) const {
    return std::any_of(in_.votes.begin(), in_.votes.end(), [code](const auto& vote) {
        const auto& proposals = vote.second.proposals;
        return std::any_of(proposals.begin(), proposals.end(), [code](const Proposal& x) { return x.code == code; });
    });
}

Cause OpPlanner::revoked() const {
    Cause c;
    c.code = Code::Revoked;
    c.epoch = in_.epoch;
    c.message = "communicator " + in_.spec.name + " was revoked; agree() and shrink() still work on it";
    return c;
}

Cause OpPlanner::lost_data() const {
    return peer_failure(newly_dead_.empty() ? in_.dead : newly_dead_, in_.evidence, in_.epoch, advice_for(in_.spec.policy));
}

}  // namespace ftcomm
