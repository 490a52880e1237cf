// The policy replay: nothing is decided without a member that died; its replacement runs the program again, gets from its log what is
// known to be complete, and takes its predecessor's place in what is not.
//
// Every result of a rank is in its log before the operation's fence begins, or, where there is no fence, before the call returns. So of
// anything that some rank has returned from, every rank either has the result in its log or can be handed it by one that has it there.
// Operations run strictly one after another: a log with result L says that all up to L - 1 are complete, and leaves open whether L is.
// That, the vote says (Decision::done_through).
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"
#include "collectives/results.h"
#include "communicator/communicator.h"

namespace ftcomm {

namespace {

// Attempts of different admissions are never the same number, whoever counted how far (M8).
constexpr std::uint32_t kAttemptsPerAdmission = 4096;
constexpr std::int64_t kFailed = -1;  // tag of a result that is an error; else the kind of the operation
constexpr std::size_t kShapeRoom = 64;  // in front of a logged result: what operation it is of

Bytes shape_block(const Shape& shape) {
    ByteWriter w;
    shape.encode(w);
    auto block = w.take();
    FT_CHECK(block.size() <= kShapeRoom, "a shape takes %zu bytes", block.size());
    block.resize(kShapeRoom);
    return block;
}

}  // namespace

void Communicator::begin_replay() {
    log_ = std::make_unique<PhasedLog>(*core_.config.log);
    auto& log = *log_;
    find_resume_point();
    pairs_ = std::make_unique<LoggedPairs>(core_, spec_, rank_, log, catching_up_, [this] { caught_up(); });
    logged_ = log.last(note_key(kResults));
    start_after_admissions();
    if (!core_.config.again) {
        FT_CHECK(logged_ == 0, "the slot's first process finds %llu results in its log",
                 static_cast<unsigned long long>(logged_));
        return;
    }
    // L is complete, too, where somebody has left: who leaves has seen that all others are as far as itself.
    served_ = logged_ == 0 ? 0 : anybody_left() || !core_.rules.l12 || failed_for_all(logged_) ? logged_ : logged_ - 1;
    shared_seq_ = served_;
    catching_up_ = true;
    if (served_ > 0) last_ = last_from_log(served_);
    freeze();  // nothing starts before a vote has said where the others stand
}

// A failure is on record only after it was decided for all.
bool Communicator::failed_for_all(std::uint64_t seq) {
    LogRecord record;
    return log_->find(note_key(kResults), seq, &record).ok() && record.tag == kFailed;
}

bool Communicator::anybody_left() const {
    return std::any_of(spec_.members.begin(), spec_.members.end(), [&](int slot) {
        const auto& m = core_.view.members[static_cast<std::size_t>(slot)];
        return !m.alive && m.evidence == Evidence::Left;
    });
}

bool Communicator::present() const {
    for (std::size_t r = 0; r < spec_.members.size(); ++r) {
        const auto& m = core_.view.members[static_cast<std::size_t>(spec_.members[r])];
        if (m.alive ? m.incarnation != incarnations_[r] : m.evidence != Evidence::Left) return false;
    }
    return true;
}

// --- the log

bool Communicator::log_result(const OpState& op) {
    if (!log_error_) return false;
    auto& log = *log_;
    const auto key = note_key(kResults);
    const auto shape = shape_block(op.shape);
    std::vector<ByteView> parts{shape};
    for (const auto& piece : result_pieces(op, rank_, static_cast<int>(spec_.members.size()))) parts.emplace_back(piece);
    if (op.seq <= log.last(key)) {  // done again, by this process or a later one: it must be the same
        LogRecord record;
        auto s = log.find(key, op.seq, &record);
        if (s) {
            auto rest = record.payload;
            bool same = record.aux == op.signature;
            for (const auto& part : parts) {
                same = same && rest.size() >= part.size() &&
                       (part.empty() || std::memcmp(rest.data(), part.data(), part.size()) == 0);
                if (same) rest = rest.subspan(part.size());
            }
            if (!same || !rest.empty()) s = Status::error(Code::ReplayDiverged, name_of(op) + " gave another result than before");
        }
        log_error_ = std::move(s);
        return log_error_.ok();
    }
    if (op.seq != log.last(key) + 1) {  // the log was full before: no record may be missing between two
        log_error_ = Status::error(Code::LogFull, "the log was full and lacks earlier results; start again from a checkpoint");
        return false;
    }
    FT_POINT("result.before");
    log_error_ = log.append(key, static_cast<std::int64_t>(op.shape.kind), op.signature, parts);
    FT_POINT("result.after");
    if (log_error_) logged_ = op.seq;
    return log_error_.ok();
}

// An operation that all ranks saw fail is part of the history as well.
void Communicator::log_failure(const OpState& op, const Status& status) {
    auto& log = *log_;
    const auto key = note_key(kResults);
    if (op.seq != log.last(key) + 1 || !core_.dead_end()) return;  // its result is there already: the record stays what it is
    Cause c;
    c.code = status.code;
    c.message = status.message;
    c.ranks.assign(status.ranks.begin(), status.ranks.end());
    c.evidence = status.evidence;
    c.epoch = status.epoch;
    ByteWriter w;
    c.encode(w);
    const auto body = w.take();
    const auto shape = shape_block(op.shape);
    const ByteView parts[] = {shape, body};
    if (log.append(key, kFailed, op.signature, parts)) logged_ = op.seq;
}

// A vote has shown that operations up to here are complete: what the log has of them may be served, and is what this rank votes with next.
void Communicator::learn_complete(std::uint64_t through) {
    served_ = std::max(served_, std::min(logged_, through));
    shared_seq_ = std::max(shared_seq_, served_);
    if (last_.seq < served_) last_ = last_from_log(served_);
    serve_logged();
}

void Communicator::serve_logged() {
    while (!open_.empty() && !open_.front()->started && open_.front()->seq <= served_) {
        auto& op = *open_.front();
        auto status = serve(op);
        if (status) {
            ++replayed_;
            mark_complete(op, rank_, static_cast<int>(spec_.members.size()));
            op.request->outcome = op.outcome(rank_, RankSet::first(static_cast<int>(spec_.members.size())), core_.view.epoch);
        }
        done_seq_ = op.seq;
        const auto request = op.request;
        open_.pop_front();
        core_.finish(request, std::move(status));
    }
}

Status Communicator::serve(OpState& op) {
    LogRecord record;
    FT_POINT("replay.serve");
    if (auto s = log_->find(note_key(kResults), op.seq, &record); !s) return s;
    const auto pieces = result_pieces(op, rank_, static_cast<int>(spec_.members.size()));
    std::size_t bytes = kShapeRoom;
    for (const auto& p : pieces) bytes += p.size();
    if (record.aux != op.signature || (record.tag != kFailed && record.payload.size() != bytes)) {
        ByteReader r(record.payload);
        auto s = Status::error(Code::ReplayDiverged,
                               "operation #" + std::to_string(op.seq) + " of communicator " + spec_.name + " was " +
                                   Shape::decode(r).text() + ", and is now " + op.shape.text() +
                                   ": the program does not do the same again. Seed its generators, take no decision from time or "
                                   "thread order, and use ftcomm.recovery.deterministic()");
        s.operation = name_of(op);
        return s;
    }
    auto from = record.payload.subspan(kShapeRoom);
    if (record.tag == kFailed) {
        ByteReader r(from);
        return Cause::decode(r).status("");
    }
    for (const auto& p : pieces) {
        std::memcpy(p.data(), from.data(), p.size());
        from = from.subspan(p.size());
    }
    return {};
}

std::shared_ptr<Bytes> Communicator::kept_in_log(std::uint64_t seq) {
    LogRecord record;
    const auto s = log_->find(note_key(kResults), seq, &record);
    FT_CHECK(s.ok(), "result %llu is to be handed out: %s", static_cast<unsigned long long>(seq), s.message.c_str());
    return std::make_shared<Bytes>(record.payload.begin() + kShapeRoom, record.payload.end());
}

Communicator::Last Communicator::last_from_log(std::uint64_t seq) {
    LogRecord record;
    Last last;
    if (!log_->find(note_key(kResults), seq, &record)) return last;
    ByteReader r(record.payload);
    last.seq = seq;
    last.shape = Shape::decode(r);
    last.logged = record.tag != kFailed;
    if (!last.logged) {
        last.state = OpVote::State::Failed;
        return last;
    }
    last.desc.kind = last.shape.kind;
    last.desc.dtype = last.shape.dtype;
    last.desc.op = last.shape.op;
    last.desc.root = last.shape.root;
    last.desc.count = last.shape.count;
    last.desc.factor = last.shape.factor;
    const auto size = static_cast<int>(spec_.members.size());
    if (last.shape.is_direct()) return last;
    shape_of(last.desc, &last.grid);
    OpState op(seq, last.desc, last.shape, last.grid, rank_, core_.rules.c8, nullptr);
    mark_complete(op, rank_, size);
    last.labels = op.label_runs();
    return last;
}

// --- who is there

void Communicator::on_view_replay() {
    freeze_sent_ = false;
    if (!present() || !(decision_.alive - in_view()).empty()) freeze();
    pairs_->on_view();
    if (frozen_) send_vote();
}

// From the view alone, not from which admissions were seen: a rank may hear of two at once, and only one of them be the communicator's.
void Communicator::start_after_admissions() {
    for (int slot : spec_.members) since_ = std::max(since_, core_.view.members[static_cast<std::size_t>(slot)].admission);
    if (since_ == 0) return;
    FT_CHECK(since_ < ~std::uint32_t{0} / kAttemptsPerAdmission, "admission %llu", static_cast<unsigned long long>(since_));
    freeze();
    attempt_ = std::max(attempt_, static_cast<std::uint32_t>(since_) * kAttemptsPerAdmission);
    decision_.attempt = attempt_;
}

// A member is back, as a new process: all start a new attempt, and vote on it.
void Communicator::on_returned(const RankSet& came) {
    core_.host.trace("replay.returned");
    freeze_sent_ = false;
    helpers_.clear();
    start_after_admissions();
    decision_.alive = RankSet::first(static_cast<int>(spec_.members.size()));
    decision_.plans.clear();
    if (!open_.empty()) open_.front()->started = false;
    for (int r : came.list()) votes_.erase(r);
    std::erase_if(votes_, [&](const auto& v) { return v.second.attempt <= attempt_; });
    std::erase_if(stash_, [&](const Stashed& f) { return f.header.attempt <= attempt_; });
}

// The first operation that is not in the log.
void Communicator::caught_up() {
    if (!std::exchange(catching_up_, false)) return;
    FT_POINT("replay.live");
    NodeEvent e;
    e.kind = NodeEvent::Kind::CaughtUp;
    e.comm = spec_.id;
    e.seq = done_seq_;
    e.text = std::to_string(replayed_) + " results and " + std::to_string(pairs_->replayed()) + " sends were in the log";
    core_.event(std::move(e));
}

}  // namespace ftcomm
