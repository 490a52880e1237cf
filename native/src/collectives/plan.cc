#include "collectives/plan.h"

#include <algorithm>

#include "base/check.h"
#include "collectives/op_state.h"

namespace ftcomm {

namespace {

void append(std::vector<SegmentRun>& runs, SegmentMode mode, int rank, const RankSet& contributors, std::uint32_t count = 1) {
    if (count == 0) return;
    if (!runs.empty() && runs.back().mode == mode && runs.back().rank == rank && runs.back().contributors == contributors) {
        runs.back().count += count;
    } else {
        runs.push_back({count, mode, rank, contributors});
    }
}

// The owner of a segment spreads the work evenly and contiguously over the living.
int owner_of(std::uint32_t segment, std::uint32_t segments, const std::vector<int>& living) {
    return living[static_cast<std::size_t>(std::uint64_t{segment} * living.size() / segments)];
}

// One voter's standing in one operation, walked segment by segment.
struct Standing {
    int rank = 0;
    enum class State { NotEntered, Open, Complete, Failed } state = State::NotEntered;
    const OpVote* op = nullptr;
    bool retained = false;
    bool logged = false;  // replay: its log has the result, which counts once it is known that the operation was completed

    LabelRun at(const Shape& shape, std::uint32_t segment) const {
        if (state == State::Open || (state == State::Complete && op != nullptr && !op->labels.empty())) {
            while (segment >= base + op->labels[run].count) {
                base += op->labels[run].count;
                ++run;
            }
            return op->labels[run];
        }
        LabelRun label{1, initial_label(shape, rank, segment / shape.per_block), {}};
        if (label.kind == LabelKind::Final) label.contributors.add(rank);
        return label;
    }

private:
    mutable std::uint32_t base = 0;   // only ever asked for ascending segments
    mutable std::size_t run = 0;
};

class OpPlanner {
public:
    OpPlanner(const PlanInput& in, const RankSet& voters, bool revoke, std::uint64_t known_done)
        : in_(in), voters_(voters), living_(voters.list()), revoke_(revoke), known_done_(known_done) {
        newly_dead_ = in.previous.alive - voters;
    }

    std::uint64_t done_through() const { return done_through_; }  // of what has been planned

    // nullopt: nobody has entered, nothing to plan. fails_rest: under raise, this and all later operations fail.
    std::optional<OpPlan> plan(std::uint64_t seq, bool* fails_rest) {
        OpPlan p;
        p.seq = seq;
        if (const auto* before = in_.previous.plan_for(seq); before != nullptr && before->verdict == OpPlan::Verdict::Fail) {
            return *before;  // C5: late entrants fail as the others did
        }
        std::vector<Standing> standings;
        bool entered = false, complete = false, failed = false;
        RankSet passed;
        for (const auto& [rank, vote] : in_.votes) {
            Standing s;
            s.rank = rank;
            s.logged = vote.logged >= seq;
            for (const auto& o : vote.ops) {
                if (o.seq != seq) continue;
                s.op = &o;
                s.retained = o.retained;
                s.state = o.state == OpVote::State::Open       ? Standing::State::Open
                          : o.state == OpVote::State::Complete ? Standing::State::Complete
                                                               : Standing::State::Failed;
                if (!entered) p.shape = o.shape;
                entered = true;
                complete |= o.state == OpVote::State::Complete;
                failed |= o.state == OpVote::State::Failed;
            }
            // Its vote speaks of a later operation that it took part in and that has ended: this one it has returned from long ago.
            for (const auto& o : vote.ops)
                if (s.op == nullptr && o.seq > seq && o.state != OpVote::State::Open) {
                    s.state = Standing::State::Complete;
                    complete = true;
                }
            // Or it failed at once there (a dead root): who runs it called something else.
            if (s.op == nullptr && s.state == Standing::State::NotEntered && vote.done_seq >= seq) passed.add(rank);
            standings.push_back(s);
        }
        if (!entered) return std::nullopt;
        // Replay: who had returned from it is dead, but its replacement has the result. Segments of it may have been handed out: then
        // reducing the others again, not as it was done the first time, would give other bits.
        if (!complete && seq <= known_done_)
            for (const auto& s : standings) complete |= s.logged;
        if (complete) done_through_ = std::max(done_through_, seq);
        if (in_.spec.policy == Policy::Replay && fails_already(seq)) return std::nullopt;  // and nobody has its result
        if (failed) {
            // It failed at once everywhere it was entered (a dead root): the same for those who come later.
            p.verdict = OpPlan::Verdict::Fail;
            p.cause = peer_failure(in_.dead, in_.evidence, in_.epoch, advice_for(in_.spec.policy));
            return p;
        }
        if (complete && (in_.rules.c7 || in_.spec.policy != Policy::Raise || newly_dead_.empty())) {
            return finish_as_completed(p, standings);
        }
        if (auto cause = disagreement(standings)) return fail(p, *cause);
        if (!passed.empty()) {
            Cause c;
            c.code = Code::Mismatch;
            c.epoch = in_.epoch;
            for (int r : passed.list()) c.ranks.push_back(r);
            c.message = "ranks " + passed.text() + " called a different operation at this point (it failed there at once) than " +
                        p.shape.text() +
                        ". Make every rank call the same collectives in the same order, with equal sizes and types";
            return fail(p, c);
        }
        const auto given_up = proposed_failure(seq, standings);
        if ((given_up || revoke_) && may_have_been_returned(p, standings)) {
            done_through_ = std::max(done_through_, seq);
            return finish_as_completed(p, standings);
        }
        if (given_up) return fail(p, *given_up);
        if (in_.spec.policy == Policy::Raise && !newly_dead_.empty()) {
            *fails_rest = true;
            return std::nullopt;
        }
        if (revoke_) return fail(p, revoked());
        // Replay: who has left comes back for nothing. A sum without it is no result of this program.
        if (in_.spec.policy == Policy::Replay && voters_.count() < static_cast<int>(in_.spec.members.size()))
            return fail(p, peer_failure(in_.dead, in_.evidence, in_.epoch, "it left before this operation"));
        return repair(p, standings);
    }

private:
    static OpPlan fail(OpPlan p, Cause cause) {
        p.verdict = OpPlan::Verdict::Fail;
        p.cause = std::move(cause);
        return p;
    }

    bool fails_already(std::uint64_t seq) const {
        for (const auto& [rank, vote] : in_.votes) {
            if (seq >= vote.revoked_from) return true;
            for (const auto& f : vote.failures)
                if (f.seq == seq) return true;
        }
        return false;
    }

    // Replay: a process that is no more may have returned it, and nobody knows. It had logged it then; and where there is a fence, so had
    // all. That is as good as its having returned: what is in the log is the result.
    bool may_have_been_returned(const OpPlan& p, const std::vector<Standing>& standings) const {
        if (in_.spec.policy != Policy::Replay) return false;
        bool inherited = false, all = true;
        for (const auto& [rank, vote] : in_.votes) inherited |= vote.inherited >= p.seq;
        for (const auto& s : standings) all &= s.logged;
        return inherited && (all || p.shape.algorithm == Algorithm::Flat);
    }

    // C7: somebody returned. Then everyone has the data (fence), or it can be handed out of what was kept (C6).
    OpPlan finish_as_completed(OpPlan p, const std::vector<Standing>& standings) {
        const Standing* holder = nullptr;
        const Standing* has_log = nullptr;
        bool all_have = true;
        const std::uint32_t n = p.shape.blocks * p.shape.per_block;
        for (const auto& s : standings) {
            if (s.state == Standing::State::Complete) {
                if (s.retained && holder == nullptr) holder = &s;
                continue;
            }
            if (s.logged) {
                if (has_log == nullptr) has_log = &s;
                continue;
            }
            if (p.shape.is_direct() || p.shape.kind == OpKind::Reduce || p.shape.kind == OpKind::ReduceScatter) continue;
            for (const auto& l :
                 s.state == Standing::State::Open ? s.op->labels : std::vector<LabelRun>{{n, LabelKind::Input, {}}})
                all_have &= l.kind == LabelKind::Final;
        }
        if (all_have) {
            p.verdict = OpPlan::Verdict::Complete;
            return p;
        }
        FT_CHECK(holder != nullptr || has_log != nullptr,
                 "operation %llu was completed by a rank, another lacks data, and nobody kept the result",
                 static_cast<unsigned long long>(p.seq));
        p.verdict = OpPlan::Verdict::Repair;
        p.settled = true;
        if (holder == nullptr) {
            const auto size = static_cast<int>(in_.spec.members.size());
            for (const auto& r : default_plan(p.shape, size, RankSet::first(size), {}, {}, 0).runs)
                append(p.runs, SegmentMode::Gather, has_log->rank, r.contributors, r.count);
            return p;
        }
        for (std::uint32_t g = 0; g < n; ++g) append(p.runs, SegmentMode::Gather, holder->rank, carried(holder->at(p.shape, g)));
        return p;
    }

    std::optional<Cause> disagreement(const std::vector<Standing>& standings) {
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
            for (const auto& x : vote.proposals)
                proposed |= first != nullptr && x.code == Code::Mismatch && x.seq == first->op->seq;
        if (first == nullptr || (c.ranks.empty() && !proposed)) return std::nullopt;
        c.message = "ranks called different operations at the same point:";
        for (const auto& s : standings)
            if (s.op != nullptr)
                c.message += (&s == first ? " rank " : "; rank ") + std::to_string(s.rank) + " called " + s.op->shape.text();
        c.message += ". Make every rank call the same collectives in the same order, with equal sizes and types";
        return c;
    }

    std::optional<Cause> proposed_failure(std::uint64_t seq, const std::vector<Standing>& standings) {
        Cause c;
        c.epoch = in_.epoch;
        for (const auto& [rank, vote] : in_.votes) {
            for (const auto& x : vote.proposals) {
                if (x.seq != seq) continue;
                // What could not be read was a dying process's: the repair shows whether the living can be read.
                if (x.code == Code::System && !newly_dead_.empty()) continue;
                if (x.code == Code::Timeout || c.code == Code::Ok) {
                    if (x.code == Code::Timeout && c.code != Code::Timeout) c.ranks.clear();
                    c.code = x.code;
                }
                if (x.code != Code::Timeout && c.code == x.code) c.ranks.push_back(rank);
            }
        }
        if (c.code == Code::Ok) return std::nullopt;
        if (c.code == Code::Timeout) {
            std::string missing;
            for (const auto& s : standings) {
                if (s.state != Standing::State::NotEntered) continue;
                c.ranks.push_back(s.rank);
                missing += (missing.empty() ? "" : ", ") + std::to_string(s.rank);
            }
            c.message = missing.empty() ? "Timed out waiting for the operation, which all ranks have entered; raise the timeout"
                                        : "Timed out: these ranks never entered it: " + missing +
                                              ". Look what they are doing, or raise the timeout";
            return c;
        }
        if (c.code == Code::System) {
            c.message =
                "the kernel did not let this rank read the memory of a living one (process_vm_readv), though it had seemed to: "
                "set FTCOMM_PEER_MEMORY=0 on all ranks; rank";
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
                "its result could not be logged (the log is full, or its files cannot be written; that rank says which) on rank";
            for (auto r : c.ranks) c.message += " " + std::to_string(r);
            c.message += "; raise log_limit, commit a checkpoint more often, or give a folder to spill to";
            return c;
        }
        if (c.code == Code::Interrupted) c.code = Code::Cancelled;
        c.message = "given up (interrupted or cancelled) on rank";
        for (auto r : c.ranks) c.message += " " + std::to_string(r);
        return c;
    }

    RankSet carried(const LabelRun& label) const {
        // C2: the set that travels with a final, not a guess.
        return in_.rules.c2 ? label.contributors : RankSet::first(static_cast<int>(in_.spec.members.size()));
    }

    std::optional<OpPlan> repair(OpPlan p, const std::vector<Standing>& standings) {
        p.verdict = OpPlan::Verdict::Repair;
        const auto gone = newly_dead_;
        if (p.shape.is_direct()) {
            if (!gone.empty()) return fail(p, peer_failure(gone, in_.evidence, in_.epoch, advice_for(in_.spec.policy)));
            if (p.shape.has_root() && !voters_.has(p.shape.root)) return fail(p, lost_root());
            return p;  // run again from the untouched inputs
        }
        if (p.shape.kind == OpKind::Reduce && !voters_.has(p.shape.root)) return fail(p, lost_root());
        const std::uint32_t n = p.shape.blocks * p.shape.per_block;
        for (std::uint32_t g = 0; g < n; ++g) {
            const int block = static_cast<int>(g / p.shape.per_block);
            const Standing* holder = nullptr;
            RankSet set;
            bool all = true;
            for (const auto& s : standings) {
                const auto label = s.at(p.shape, g);
                if (label.kind != LabelKind::Final) {
                    all = false;
                    continue;
                }
                if (holder == nullptr) {
                    holder = &s;
                    set = carried(label);
                } else {
                    FT_CHECK(!in_.rules.c2 || set == label.contributors, "two finals of segment %u with different contributors",
                             g);
                }
            }
            if (!repair_segment(p, block, holder, set, all)) return fail(p, lost_data(block));
        }
        if (p.shape.kind == OpKind::AllReduce) {
            // Replay: as the operation would have gone, or the order of the sums, and with it their bits, would be another.
            if (in_.spec.policy == Policy::Replay && in_.rules.l7) keep_owners(p.runs, n);
            else spread_reductions(p.runs);
        }
        return p;
    }

    void keep_owners(std::vector<SegmentRun>& runs, std::uint32_t segments) const {
        std::vector<SegmentRun> out;
        std::uint32_t g = 0;
        for (const auto& r : runs)
            for (std::uint32_t i = 0; i < r.count; ++i, ++g)
                append(out, r.mode, r.mode == SegmentMode::Reduce ? owner_of(g, segments, living_) : r.rank, r.contributors);
        runs = std::move(out);
    }

    // What is left to reduce may be the share of one dead rank: all take an equal part of it.
    void spread_reductions(std::vector<SegmentRun>& runs) const {
        std::uint32_t total = 0, at = 0;
        for (const auto& r : runs)
            if (r.mode == SegmentMode::Reduce) total += r.count;
        std::vector<SegmentRun> out;
        for (const auto& r : runs) {
            if (r.mode != SegmentMode::Reduce) {
                out.push_back(r);
                continue;
            }
            for (std::uint32_t i = 0; i < r.count; ++i)
                append(out, SegmentMode::Reduce, owner_of(at++, total, living_), r.contributors);
        }
        runs = std::move(out);
    }

    bool repair_segment(OpPlan& p, int block, const Standing* holder, const RankSet& set, bool all) {
        switch (p.shape.kind) {
            case OpKind::AllReduce:
                if (all) {
                    append(p.runs, SegmentMode::None, 0, set);
                } else if (holder != nullptr) {
                    append(p.runs, SegmentMode::Gather, holder->rank, set);
                } else {
                    append(p.runs, SegmentMode::Reduce, 0, voters_);  // spread_reductions() says whose
                }
                return true;
            case OpKind::Broadcast:
                if (holder == nullptr) return false;
                if (all) {
                    append(p.runs, SegmentMode::None, 0, set);
                } else {
                    append(p.runs, SegmentMode::Gather, voters_.has(p.shape.root) ? p.shape.root : holder->rank, set);
                }
                return true;
            case OpKind::AllGather:
                if (all) {
                    append(p.runs, SegmentMode::None, 0, set);
                } else if (holder != nullptr) {
                    append(p.runs, SegmentMode::Gather, voters_.has(block) ? block : holder->rank, set);
                } else {
                    // Of a rank that died in it, now or in an earlier attempt: whoever has entered holds those absent from the start.
                    return false;
                }
                return true;
            case OpKind::Reduce:
            case OpKind::ReduceScatter: {
                const int owner = p.shape.kind == OpKind::Reduce ? p.shape.root : block;
                if (!voters_.has(owner)) {
                    append(p.runs, SegmentMode::None, 0, RankSet{});
                } else if (holder != nullptr) {
                    append(p.runs, SegmentMode::None, 0, set);
                } else {
                    append(p.runs, SegmentMode::Reduce, owner, voters_);
                }
                return true;
            }
            default: return true;
        }
    }

    // Whoever revokes may never enter what the others wait in (C7: unless somebody has returned from it).
    Cause revoked() const {
        Cause c;
        c.code = Code::Revoked;
        c.epoch = in_.epoch;
        c.message = "communicator " + in_.spec.name + " was revoked; agree() and shrink() still work on it";
        return c;
    }
    Cause lost_root() const { return peer_failure(in_.dead, in_.evidence, in_.epoch, advice_for(in_.spec.policy)); }
    Cause lost_data(int block) const {
        (void)block;
        return peer_failure(newly_dead_.empty() ? in_.dead : newly_dead_, in_.evidence, in_.epoch, advice_for(in_.spec.policy));
    }

    const PlanInput& in_;
    RankSet voters_, newly_dead_;
    std::uint64_t done_through_ = 0;
    std::vector<int> living_;
    bool revoke_;
    std::uint64_t known_done_;
};

}  // namespace

const char* advice_for(Policy policy) {
    if (policy == Policy::Replay) return "under the policy replay its replacement has to come back; it was given up";
    return policy == Policy::Raise ? "call shrink() to go on without it, or use policy=\"lossy\""
                                   : "this operation needs what only the dead rank had; others go on without it";
}

Cause peer_failure(const RankSet& dead, const std::map<int, Evidence>& evidence, std::uint64_t epoch, const char* advice) {
    Cause c;
    c.code = Code::PeerFailure;
    c.epoch = epoch;
    std::string names;
    for (int r : dead.list()) {
        c.ranks.push_back(r);
        const auto it = evidence.find(r);
        const auto e = it == evidence.end() ? Evidence::None : it->second;
        c.evidence.push_back(e);
        names += (names.empty() ? "" : ", ") + std::to_string(r) + " (" + to_string(e) + ")";
    }
    c.message = "rank " + names + " is gone since epoch " + std::to_string(epoch) + "; " + advice;
    return c;
}

DefaultPlan default_plan(const Shape& shape, int size, const RankSet& alive, const RankSet& dead,
                         const std::map<int, Evidence>& evidence, std::uint64_t epoch) {
    (void)size;
    DefaultPlan out;
    if (shape.has_root() && !alive.has(shape.root)) {
        out.cause = peer_failure(dead, evidence, epoch, advice_for(Policy::Lossy));  // others fail as a whole
        return out;
    }
    if (shape.is_direct()) return out;
    const auto living = alive.list();
    const std::uint32_t n = shape.blocks * shape.per_block;
    for (std::uint32_t b = 0; b < (n == 0 ? 0 : shape.blocks); ++b) {
        const int block = static_cast<int>(b);
        RankSet own;
        own.add(block);
        switch (shape.kind) {
            case OpKind::AllReduce:
                for (std::uint32_t g = 0; g < shape.per_block; ++g)
                    append(out.runs, SegmentMode::Reduce, owner_of(g, n, living), alive);
                break;
            case OpKind::Broadcast: {
                RankSet root;
                root.add(shape.root);
                append(out.runs, SegmentMode::Gather, shape.root, root, shape.per_block);
                break;
            }
            case OpKind::AllGather:
                if (alive.has(block)) {
                    append(out.runs, SegmentMode::Gather, block, own, shape.per_block);
                } else {
                    append(out.runs, SegmentMode::Absent, 0, RankSet{}, shape.per_block);
                }
                break;
            case OpKind::Reduce: append(out.runs, SegmentMode::Reduce, shape.root, alive, shape.per_block); break;
            case OpKind::ReduceScatter:
                if (alive.has(block)) {
                    append(out.runs, SegmentMode::Reduce, block, alive, shape.per_block);
                } else {
                    append(out.runs, SegmentMode::None, 0, RankSet{}, shape.per_block);
                }
                break;
            default: break;
        }
    }
    return out;
}

namespace {

constexpr auto kNever = ~std::uint64_t{0};

// Replay: whoever leads may be new, and know of no failure but from the others.
void carry_failures(const PlanInput& in, Decision* d) {
    std::map<std::uint64_t, Cause> all;
    for (const auto& f : in.previous.failures) all.emplace(f.seq, f.cause);
    for (const auto& [rank, vote] : in.votes) {
        d->revoked_from = std::min(d->revoked_from, vote.revoked_from);
        for (const auto& f : vote.failures) all.emplace(f.seq, f.cause);
    }
    for (const auto& p : d->plans)
        if (p.verdict == OpPlan::Verdict::Fail) all.emplace(p.seq, p.cause);
    for (const auto& [seq, cause] : all) d->failures.push_back({seq, cause});
}

}  // namespace

Decision make_decision(const PlanInput& in) {
    RankSet voters;
    std::uint64_t lowest = ~std::uint64_t{0}, highest = 0;
    std::uint64_t known_done = 0;
    bool revoke = in.previous.revoked;
    Decision d;
    for (const auto& [rank, vote] : in.votes) {
        voters.add(rank);
        lowest = std::min(lowest, vote.done_seq);
        d.done_through = std::max(d.done_through, vote.done_seq);
        known_done = std::max(known_done, vote.known_done);
        highest = std::max(highest, vote.done_seq);
        for (const auto& o : vote.ops) highest = std::max(highest, o.seq);
        for (const auto& p : vote.proposals) revoke |= p.seq == 0;
        revoke |= vote.revoked_from != kNever;
    }
    d.attempt = in.previous.attempt + 1;
    d.epoch = in.epoch;
    d.alive = voters;
    d.fail_from = in.previous.fail_from;
    d.cause = in.previous.cause;
    d.agree_seq = in.previous.agree_seq;
    d.agree_value = in.previous.agree_value;
    d.agree_cause = in.previous.agree_cause;
    d.agree_survivors = in.previous.agree_survivors;

    OpPlanner planner(in, voters, revoke, known_done);
    bool timed_out = false;
    bool fails_rest = false;
    // C5: a recorded failure stays recorded until all are past it, also when everybody who had entered the operation is gone.
    auto planned = highest;
    for (const auto& p : in.previous.plans)
        if (p.verdict == OpPlan::Verdict::Fail) planned = std::max(planned, p.seq);
    for (std::uint64_t seq = lowest + 1; seq <= planned && seq < d.fail_from && !fails_rest; ++seq) {
        auto p = planner.plan(seq, &fails_rest);
        if (p) {
            timed_out |= p->verdict == OpPlan::Verdict::Fail && p->cause.code == Code::Timeout;
            d.plans.push_back(std::move(*p));
        }
        if (fails_rest) d.fail_from = std::min(d.fail_from, seq);
    }
    d.done_through = std::max(d.done_through, planner.done_through());
    const auto newly_dead = in.previous.alive - voters;
    if (in.spec.policy == Policy::Raise && !newly_dead.empty()) {
        // Nothing open, or the loop above stopped at the first operation that cannot be completed.
        if (!fails_rest) d.fail_from = std::min(d.fail_from, highest + 1);
        d.cause = peer_failure(in.dead, in.evidence, in.epoch, advice_for(in.spec.policy));
    }
    d.revoked = revoke || timed_out;
    d.revoked_from = in.previous.revoked ? in.previous.revoked_from : d.revoked ? highest + 1 : d.revoked_from;
    if (in.spec.policy == Policy::Replay) carry_failures(in, &d);
    return d;
}

std::string describe(const OpPlan& plan) {
    std::string text = plan.shape.text() + " #" + std::to_string(plan.seq) + ": ";
    if (plan.verdict == OpPlan::Verdict::Complete) return "#" + std::to_string(plan.seq) + ": complete";
    if (plan.verdict == OpPlan::Verdict::Fail) return "#" + std::to_string(plan.seq) + ": " + to_string(plan.cause.code);
    std::uint32_t by_mode[4] = {};
    for (const auto& r : plan.runs) by_mode[static_cast<int>(r.mode)] += r.count;
    return text + "keep " + std::to_string(by_mode[0]) + ", reduce " + std::to_string(by_mode[1]) + ", hand out " +
           std::to_string(by_mode[2]) + ", absent " + std::to_string(by_mode[3]) + " segments";
}

}  // namespace ftcomm
