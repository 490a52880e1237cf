// What a user posts on a communicator, and its clock. How operations run is in operations.cc, votes are in vote.cc, decisions in decide.cc,
// agree and shrink in agree.cc.
#include "communicator/communicator.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/reduce.h"
#include "collectives/overlap.h"
#include "collectives/results.h"
#include "communicator/restore.h"

namespace ftcomm {

namespace {

std::vector<int> ranks_of_slots(const std::vector<int>& members, std::size_t slots) {
    std::vector<int> ranks(slots, -1);
    for (std::size_t r = 0; r < members.size(); ++r) ranks[static_cast<std::size_t>(members[r])] = static_cast<int>(r);
    return ranks;
}

}  // namespace

Communicator::Communicator(Core& core, CommSpec spec, bool claimed)
    : core_(core),
      spec_(std::move(spec)),
      claimed_(claimed),
      rank_of_slot_(ranks_of_slots(spec_.members, core.view.members.size())),
      rank_(rank_of_slot(core.self())),
      p2p_(core, spec_, rank_),
      board_(core.boards),
      posts_(board_, core.shared) {
    FT_CHECK(rank_ >= 0, "communicator %s does not contain this rank", spec_.name.c_str());
    for (int m : spec_.members) {
        const auto& state = core_.view.members[static_cast<std::size_t>(m)];
        incarnations_.push_back(m == core_.self() ? core_.config.incarnation : state.incarnation);
        members_hash_ = (members_hash_ + static_cast<std::uint64_t>(m) + 1) * 0x9e3779b97f4a7c15ULL;
    }
    decision_.alive = RankSet::first(static_cast<int>(spec_.members.size()));
    if (spec_.policy == Policy::Replay) begin_replay();
    FT_POINT("comm.create");
}

void Communicator::claim(const CommSpec& spec) {
    claimed_ = true;
    spec_.name = spec.name;
    if (spec.timeout > 0) spec_.timeout = spec.timeout;
}

Status Communicator::check(const OpDesc& d) const {
    const auto size = static_cast<int>(spec_.members.size());
    const auto n = static_cast<std::size_t>(size);
    if (d.root < 0 || d.root >= size)
        return Status::error(Code::Invalid, "root " + std::to_string(d.root) + " is not a rank of this communicator of size " +
                                                std::to_string(size));
    if (reduces(d.kind) && !reduce_supported(d.dtype, d.op))
        return Status::error(Code::Unsupported, std::string(to_string(d.op)) + " is not defined for " + to_string(d.dtype));
    const auto& per = d.per_rank();
    for (const auto* v : {&per.send_counts, &per.send_offsets, &per.recv_counts, &per.recv_offsets})
        if (!v->empty() && v->size() != n)
            return Status::error(Code::Invalid, "counts and offsets need one entry per rank (" + std::to_string(size) +
                                                    "), got " + std::to_string(v->size()));
    if (d.algorithm == Algorithm::RingLogged && (d.kind != OpKind::AllReduce || !replays()))
        return Status::error(Code::Unsupported,
                             "ring-logged is an all_reduce made of logged messages: it needs the policy replay (ftrun --policy)");
    return {};
}

namespace {

// At most `segment` elements, and as many segments for each rank: else some own one more than others, and all wait for them.
std::uint64_t equal_segments(std::uint64_t count, std::uint64_t segment, std::uint64_t ranks) {
    const auto least = (count + segment - 1) / segment;
    const auto segments = (least + ranks - 1) / ranks * ranks;
    return segments == 0 ? segment : std::min(segment, ((count + segments - 1) / segments + 15) & ~std::uint64_t{15});
}

// Bytes of what all have at the end.
std::uint64_t flat_limit_of(OpKind kind, std::size_t ranks) {
    switch (kind) {
        case OpKind::Reduce: return ranks <= 2 ? 16384 : 4096;
        case OpKind::ReduceScatter: return ranks <= 4 ? 8192 : 4096;
        case OpKind::AllReduce: return ranks <= 2 ? 65536 : ranks == 3 ? 32768 : 16384;
        case OpKind::AllToAll: return ranks <= 2 ? 65536 : ranks <= 4 ? 16384 : 8192;
        default: return ranks <= 4 ? 65536 : 16384;
    }
}

// Where ranks share processors, what one waits for costs it a switch to another one: few messages are the faster way for longer.
std::uint64_t crowded_flat_limit_of(OpKind kind, std::size_t ranks, bool staged, bool shown) {
    switch (kind) {
        case OpKind::Reduce: return staged ? 8192 : ranks == 3 ? 65536 : ranks == 4 ? 16384 : 32768;
        case OpKind::ReduceScatter: return ranks <= 4 ? 16384 : 65536;
        case OpKind::AllToAll: return shown ? (ranks <= 4 ? 49152 : 65536) : ranks <= 4 ? 16384 : 32768;
        case OpKind::AllReduce:
            if (staged) return ranks <= 6 ? 16384 : 49152;
            return ranks <= 4 ? 32768 : 65536;
        case OpKind::Broadcast: return staged ? 32768 : 65536;  // by windows each byte is copied less often
        default: return 65536;
    }
}

}  // namespace

// Each rank sends to all others what it has, n(n-1) messages: where it is little, and, where nothing is summed and every rank only says that it
// is there, not by many; many send 2(n-1) along a tree. C8: the same table on all ranks; what it says is part of the signature.
bool Communicator::is_flat(const OpDesc& d) const {
    const auto n = spec_.members.size();
    // An all-to-all with counts is not: what others have for each other is not known here. (Nor one under replay, where a result is logged.)
    const auto& per = d.per_rank();
    const bool counts =
        !(per.send_counts.empty() && per.send_offsets.empty() && per.recv_counts.empty() && per.recv_offsets.empty());
    const bool all_to_all = d.kind == OpKind::AllToAll && !counts && !replays();
    const bool can_be = d.kind == OpKind::AllReduce || ((gathers(d.kind) || reduces(d.kind) || all_to_all) && n > 1);
    const bool has_parts = d.kind == OpKind::ReduceScatter || all_to_all;
    const auto message = d.count * size_of(d.dtype) * (has_parts ? n : 1);
    if (!can_be || d.algorithm == Algorithm::Ring || message > core_.sender.max_payload()) return false;
    if (d.algorithm == Algorithm::Flat) return true;
    if (all_to_all && n > kStraight) return false;  // each gets n times as much as it asks for
    if (gathers(d.kind) && n > kStraight && !core_.config.has_flat_trees(n)) return false;
    const auto bytes = d.kind == OpKind::AllGather || all_to_all ? n * message : message;
    const bool premultiplied = reduces(d.kind) && d.op == ReduceOp::PremulSum;
    const bool staged = !premultiplied && n <= kMostStaged && core_.config.stage_limit <= message;
    auto limit = n > 2 && prefers_few_messages(d, bytes)
                     ? crowded_flat_limit_of(d.kind, n, staged, message <= core_.config.post_limit)
                     : flat_limit_of(d.kind, n);
    // A limit that was tuned is that of an all-reduce.
    if (const auto given = core_.config.flat_limit; given > 0)
        limit = d.kind == OpKind::Reduce || has_parts ? std::min(limit, given) : given;
    return bytes <= limit;
}

// Nothing of an all-to-all is passed on: what windows save are messages and system calls, for a second copy. So of some ranks, and not of much
// (but where links are as dear as windows, and few share the caches).
constexpr std::size_t kLeastExchanged = 4;
constexpr std::uint64_t kMostExchanged = 1u << 20;  // bytes of a rank's input

// Where all parts are as long, and all call it so: part of the signature, as of a small one.
bool Communicator::may_exchange_in_windows(const OpDesc& d) const {
    const auto n = spec_.members.size();
    if (d.kind != OpKind::AllToAll || d.layout != nullptr || d.count == 0 || !core_.view.crowded || replays()) return false;
    const auto bytes = d.count * size_of(d.dtype) * n;
    return n >= kLeastExchanged && n <= kMostStaged && (bytes <= kMostExchanged || streams_decide()) &&
           bytes >= core_.config.stage_limit;
}

// Not under replay, where a later generation of the job may be on other machines, and has to do the same. And not what would go straight to
// more ranks than that is good for, nor sums of narrow numbers there, which each rank makes for itself.
bool Communicator::prefers_few_messages(const OpDesc& d, std::uint64_t bytes) const {
    if (!core_.view.crowded || replays()) return false;
    if (spec_.members.size() <= kStraightOnHost) return !reduces(d.kind) || size_of(d.dtype) >= sizeof(float);
    return core_.config.flat_trees &&
           ((d.kind == OpKind::AllToAll && core_.config.post_limit > 0) || fits_tree(d.kind, bytes, size_of(d.dtype)));
}

Shape Communicator::shape_of(const OpDesc& d, Grid* grid) const {
    Shape s;
    s.kind = d.kind;
    s.dtype = d.dtype;
    s.root = d.root;
    s.factor = d.factor;
    if (reduces(d.kind)) s.op = d.op;
    const auto n = static_cast<std::uint32_t>(spec_.members.size());
    const auto esize = size_of(d.dtype);
    const auto limit = core_.config.segment_bytes > 0 ? core_.config.segment_bytes : kSegmentBytes;
    s.algorithm = is_flat(d)                       ? Algorithm::Flat
                  : may_exchange_in_windows(d)     ? Algorithm::Auto
                  : s.is_direct()                  ? Algorithm::Direct
                  : d.algorithm == Algorithm::Ring ? Algorithm::Ring
                                                   : Algorithm::Auto;
    // Counts differ between ranks with and without per-rank counts; pairs check their own
    s.count = s.algorithm == Algorithm::Direct ? 0 : d.count;
    auto segment = std::min<std::uint64_t>(limit, core_.sender.max_payload()) / esize;
    if (d.kind == OpKind::AllReduce && segment > 0) segment = equal_segments(d.count, segment, n);
    const bool blocked = s.runs_as() == OpKind::AllGather || s.runs_as() == OpKind::ReduceScatter;
    const bool has_parts = s.runs_as() != s.kind && d.kind != OpKind::Reduce;
    const auto all = s.is_direct() ? 0 : has_parts ? d.count * n : d.count;  // elements of a block
    // A block of a flat one is one segment: a rank has all of its input, or all of the result, so it can be run again as it was (L7).
    *grid = Grid::make(blocked ? n : 1, all, s.algorithm == Algorithm::Flat ? all : segment);
    s.blocks = grid->blocks;
    s.per_block = grid->per_block;
    return s;
}

std::uint64_t Communicator::signature_of(const Shape& shape) {
    if (signature_ == 0 || !(signed_ == shape)) {
        auto what = shape;
        if (!core_.rules.c8) what.algorithm = Algorithm::Ring;  // rule C8 switched off
        signed_ = shape;
        signature_ = what.signature() + members_hash_ + static_cast<std::uint64_t>(spec_.policy);
        // Under replay a sum that is done again has to take the way that it took.
        if (what.algorithm == Algorithm::Flat && core_.config.has_flat_trees(spec_.members.size()))
            signature_ += static_cast<std::uint64_t>(core_.config.spread_degree) * 0x9e3779b97f4a7c15ULL;
    }
    return signature_;
}

// What a call means follows from this, the communicator's size and the configuration.
bool Communicator::is_called_again(const OpDesc& d) const {
    const auto& c = called_;
    return called_any_ && d.count == c.count && d.kind == c.kind && d.dtype == c.dtype && d.op == c.op &&
           d.algorithm == c.algorithm && d.root == c.root && OpDesc::same_factor(d.factor, c.factor) && d.layout == nullptr;
}

RequestPtr Communicator::collective(const OpDesc& desc) {
    if (desc.kind == OpKind::Barrier && desc.count != 0) {  // it has no data, whatever a caller says
        auto without = desc;
        without.count = 0;
        return collective(without);
    }
    auto request = core_.fresh_request();
    note_use();
    const bool again = is_called_again(desc);
    auto s = again ? Status{} : check(desc);
    if (s) s = check_overlap(desc, rank_, spec_.members.size());
    if (!s) {
        core_.finish(request, std::move(s));
        return request;
    }
    const Time timeout = desc.timeout > 0 ? desc.timeout : this->timeout();
    if (desc.algorithm == Algorithm::RingLogged) {
        Status s = dead_end();
        if (s && decision_.revoked) s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
        if (s) ring().post(request, desc, timeout);
        else core_.finish(request, std::move(s));
        return request;
    }
    if (!again) {
        called_shape_ = shape_of(desc, &called_grid_);
        called_any_ = desc.layout == nullptr;
        if (called_any_) called_ = desc;
    }
    const auto& shape = called_shape_;
    const bool alone = core_.solo && !replays();
    // Counted while this rank is alone, too: it names what is derived from this communicator, as it does on those who go on.
    const auto seq = next_seq_++;
    auto op = spare_op_ != nullptr ? std::move(spare_op_) : std::make_unique<OpState>();
    op->begin(seq, desc, shape, called_grid_, rank_, signature_of(shape), request);
    if (alone) {
        op->bring_in();
        op->make_room();
        run_alone(*op, static_cast<int>(spec_.members.size()), rank_, {}, true);
        op->outcome(rank_, RankSet::only(rank_), core_.view.epoch, &request->outcome);
        op->give();
        core_.finish(request, dead_end());
        return request;
    }
    if (at_dead_end()) {  // nobody will ever vote here again
        core_.finish(request, dead_end());
        return request;
    }
    op->timeout = timeout;
    op->deadline = core_.now + timeout;
    open_.push_back(std::move(op));
    pump();
    return request;
}

RequestPtr Communicator::send(const void* data, std::uint64_t bytes, int dst, std::int64_t tag) {
    auto request = core_.fresh_request();
    Status s = dead_end();
    if (s && decision_.revoked) s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
    if (s && (dst < 0 || dst >= static_cast<int>(spec_.members.size())))
        s = Status::error(Code::Invalid, "destination " + std::to_string(dst) + " is not a rank of communicator " + spec_.name);
    if (s && core_.solo && dst != rank_ && !replays())
        s = Status::error(Code::Unsupported, "this replacement is not admitted yet: no messages before its first join point");
    if (!s) {
        core_.finish(request, std::move(s));
    } else {
        note_use();
        if (replays()) pairs_->send(request, data, bytes, dst, tag, core_.now + timeout());
        else p2p_.send(request, data, bytes, dst, tag, core_.now + timeout());
    }
    return request;
}

RequestPtr Communicator::recv(void* data, std::uint64_t bytes, int src, std::int64_t tag) {
    auto request = core_.fresh_request();
    Status s = dead_end();
    if (s && decision_.revoked) s = Status::error(Code::Revoked, "communicator " + spec_.name + " was revoked");
    if (s && src >= static_cast<int>(spec_.members.size()))
        s = Status::error(Code::Invalid, "source " + std::to_string(src) + " is not a rank of communicator " + spec_.name);
    if (s && core_.solo && src != rank_ && !replays())
        s = Status::error(Code::Unsupported, "this replacement is not admitted yet: no messages before its first join point");
    if (!s) {
        core_.finish(request, std::move(s));
    } else {
        note_use();
        if (replays()) pairs_->recv(request, data, bytes, src, tag, core_.now + timeout());
        else p2p_.recv(request, data, bytes, src == kAnyOrFail || src >= 0 ? src : kAny, tag, core_.now + timeout());
    }
    return request;
}

std::string Communicator::name_of(const OpState& op) const {
    return op.shape.text() + " #" + std::to_string(op.seq) + " of communicator " + spec_.name;
}

void Communicator::on_writable(int slot) {
    p2p_.on_writable(slot);
    if (replays()) for_pairs([&](LoggedPairs& pairs) { pairs.on_writable(slot); });
    if (run_ != nullptr && !frozen_) {
        run_->on_writable(slot);
        after_progress();
    }
}

void Communicator::on_tick() {
    p2p_.on_tick(core_.now);
    if (replays()) for_pairs([&](LoggedPairs& pairs) { pairs.on_tick(core_.now); });
    if (group_resume_ && group_resume_->request != nullptr && core_.now > group_resume_->deadline)
        end_group_resume(Status::error(Code::Timeout, "Timed out: not all of this rank's log group have come to resume"));
    // For a whole tick: the view that they are from may have been lost on its way.
    const bool holds = !held_votes_.empty() || !held_records_.empty();
    if (holds && held_at_tick_) core_.wants_view = true;
    held_at_tick_ = holds;
    hurry_votes();
    if (run_ != nullptr && !frozen_) {
        run_->on_tick();
        after_progress();
        core_.has_work |= run_ != nullptr && run_->has_work();
    }
    if (open_.empty()) return;
    auto& op = *open_.front();
    if (op.started && !op.timeout_proposed && core_.now > op.deadline) {
        op.timeout_proposed = true;
        core_.host.trace("timeout");
        propose(Code::Timeout, op.seq);
    }
    if (core_.now > std::max(op.deadline, patience_)) give_up_on_the_dead(Code::PeerFailure);
}

bool Communicator::fail_request(const RequestPtr& given, Code why) {
    const auto request = waited_for(given);
    for (auto& op : open_) {
        if (op->request != request) continue;
        propose(why, op->seq);
        if (why == Code::Interrupted) give_up_on_the_dead(why);
        return true;
    }
    if (group_resume_ && group_resume_->request == request && request != nullptr) {
        end_group_resume(Status::error(why, "resume was given up"));
        return true;
    }
    if (agree_.active && agree_.request == request) return true;  // ends with the vote, never privately
    return p2p_.cancel(request) || (replays() && (pairs_->cancel(request) || (ring_ && ring_->fail(request, why))));
}

void Communicator::fail_everything(const Status& status) {
    if (restore_ != nullptr) restore_->fail(status);
    drop_run();
    helpers_.clear();
    while (!open_.empty()) finish_current(status);
    fail_messages(status);
    if (agree_.active) {
        agree_.active = false;
        core_.finish(agree_.request, status);
    }
}

void Communicator::fail_messages(const Status& status) {
    p2p_.fail_all(status);
    end_group_resume(status);
    if (replays()) for_pairs([&](LoggedPairs& pairs) { pairs.fail_all(status); });
}

void Communicator::on_dead_end() { fail_everything(dead_end()); }

void Communicator::close() {
    closed_ = true;
    core_.unmarked.erase(spec_.id);
    const auto closed = Status::error(Code::Closed, "communicator " + spec_.name + " was closed");
    fail_messages(closed);
    if (!replays()) p2p_.forget_arrived();
    keep_apart();
}

RankSet Communicator::failed() const {
    RankSet all = RankSet::first(static_cast<int>(spec_.members.size()));
    RankSet out = all - in_view();
    for (int r : all.list())
        if (core_.left.has(spec_.members[static_cast<std::size_t>(r)])) out.add(r);
    return out;
}

// So that the first n of them stay what they were when the user looked.
const std::vector<int>& Communicator::failed_in_order() {
    auto now = failed();
    std::erase_if(known_failed_, [&](int r) { return !now.has(r); });
    for (int r : known_failed_) now.remove(r);
    for (int r : now.list()) known_failed_.push_back(r);
    return known_failed_;
}

void Communicator::ack_failed(int n) {
    const auto& all = failed_in_order();
    const auto known = n < 0 ? all.size() : std::min(all.size(), static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < known; ++i) acked_.add(all[i]);
    p2p_.on_failures(failed(), acked_, evidence());
}

bool Communicator::blocked_on(int slot) const {
    const int r = rank_of_slot(slot);
    if (r < 0 || !decision_.alive.has(r)) return false;
    return frozen_ || !open_.empty() || agree_.active || p2p_.waits_for(r) || (replays() && pairs_->waits_for(r));
}

}  // namespace ftcomm
