// resume and commit_checkpoint are collective: before anything is written down, every rank learns where all others are. One all-gather carries
// that: the tag, whether anything is open, how many marks are written, and how many messages went to and came from each rank. As all have the
// same rows, all come to the same answer: a checkpoint is committed on all ranks, or refused on all.
//
// To take part is no commit (L2): a process that dies after it has told the others, and before it has written its mark, has no such
// checkpoint. Its replacement starts from the one before, comes here again, and gets the rows from the log, or tells the same again.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/joined.h"
#include "communicator/checkpoints.h"

namespace ftcomm {

struct Communicator::Checkpoints::Agreement {
    static constexpr std::size_t kTag = 0, kState = 1, kMarked = 2, kCounts = kAgreementCounts;  // of a row
    enum State : std::int64_t { kBusy, kQuiet, kFailed, kElsewhere, kFull };
    RequestPtr request, gather;
    std::string tag;
    bool commits = false, noted = false;  // noted: the tag is that of a note
    ProgramPlace here;  // behind it
    Status room;  // why this rank's log has none
    std::size_t width = 0;
    std::vector<std::int64_t> mine, all;

    std::int64_t row(std::size_t rank, std::size_t what) const { return all[rank * width + what]; }
};

namespace {

std::string list_of(const std::vector<int>& ranks) { return "[" + joined(ranks) + "]"; }

Status refused(std::string text, std::vector<int> ranks) {
    auto s = Status::error(Code::Invalid, std::move(text));
    s.ranks = std::move(ranks);
    return s;
}

}  // namespace

Communicator::Checkpoints::Checkpoints(Communicator& comm)
    : comm_(comm), core_(comm.core_), spec_(comm.spec_), rank_(comm.rank_) {}

Communicator::Checkpoints::~Checkpoints() {
    if (agreement_ != nullptr) --core_.agreements;
}

RequestPtr Communicator::Checkpoints::resume(const std::string& tag, bool noted) {
    if (marks_ > 0) return refuse("resume was called before on communicator " + spec_.name + ": call it once");
    if (!group_resume_) return begin_agreement(tag, false, noted);
    if (group_resume_->request != nullptr)
        return refuse("resume on communicator " + spec_.name + " while another one is under way: wait for it first");
    const auto here = group_resume_->here;  // told to go back further: the others know already that this process is here
    auto request = std::make_shared<Request>();
    std::uint64_t number = 0;
    if (auto s = find_mark(tag, here, &number); !s) core_.finish(request, std::move(s));
    else resume_with_group(request, number, here);
    return request;
}

RequestPtr Communicator::Checkpoints::commit(const std::string& tag) {
    if (marks_ == 0)
        return refuse("checkpoint " + tag +
                      ": call resume() first, once, where the preparations end that every process makes "
                      "again: it says what a replacement can leave out");
    return begin_agreement(tag, true);
}

RequestPtr Communicator::Checkpoints::refuse(std::string text) {
    auto request = std::make_shared<Request>();
    core_.finish(request, Status::error(Code::Invalid, std::move(text)));
    return request;
}

RequestPtr Communicator::Checkpoints::begin_agreement(const std::string& tag, bool commits, bool noted) {
    if (agreement_ != nullptr)
        return refuse("resume or commit_checkpoint on communicator " + spec_.name +
                      " while another one is under way: wait for it first");
    agreement_ = std::make_unique<Agreement>();
    auto& a = *agreement_;
    a.request = std::make_shared<Request>();
    a.tag = tag;
    a.commits = commits;
    a.noted = noted;
    // What is said to the others is what the mark will say: after they have agreed, messages from further on may be here already.
    a.here = place();
    a.here.next_seq = comm_.next_seq_ + 1;
    const auto& messages = a.here.messages;
    const auto bytes = std::as_bytes(std::span(tag));
    const auto state = comm_.ring_ != nullptr && comm_.ring_->has_failed() ? Agreement::kFailed
                       : !messages.quiet                                   ? Agreement::kBusy
                       : commits && !used_elsewhere().empty()              ? Agreement::kElsewhere
                       : !(a.room = prepare_mark(tag, a.here))             ? Agreement::kFull
                                                                           : Agreement::kQuiet;
    a.mine = {commits ? static_cast<std::int64_t>(hash64(bytes)) : 0, state, static_cast<std::int64_t>(marks_)};
    for (const auto* counts : {&messages.sent, &messages.received})
        for (auto n : *counts) a.mine.push_back(static_cast<std::int64_t>(n));
    a.width = a.mine.size();
    a.all.resize(a.width * spec_.members.size());
    if (!core_.rules.l2 && commits) {  // rule L2 switched off: the vote counts as the commit
        const auto before = marks_;
        (void)pass_checkpoint(tag, a.here, before);
        marks_ = before;
    }
    OpDesc d;
    d.kind = OpKind::AllGather;
    d.dtype = DType::Int64;
    d.algorithm = Algorithm::Ring;  // nobody reads these rows where they are
    d.count = a.width;
    d.send = a.mine.data();
    d.recv = a.all.data();
    const auto request = a.request;
    ++core_.agreements;
    a.gather = comm_.collective(d);
    return request;  // settle() looks whether all have told
}

RequestPtr Communicator::Checkpoints::waited_for(const RequestPtr& request) const {
    return agreement_ != nullptr && agreement_->request == request ? agreement_->gather : request;
}

// After every input.
void Communicator::Checkpoints::settle() {
    if (agreement_ == nullptr || agreement_->gather == nullptr || !agreement_->gather->done.load(std::memory_order_relaxed))
        return;
    const auto a = std::move(agreement_);
    --core_.agreements;
    auto status = a->gather->status;
    if (status) status = judge(*a);
    if (status) {
        if (a->commits) {
            std::uint64_t acknowledged = marks_;
            for (std::size_t r = 0; r < spec_.members.size(); ++r)
                acknowledged = std::min(acknowledged, static_cast<std::uint64_t>(a->row(r, Agreement::kMarked)));
            status = pass_checkpoint(a->tag, a->here, acknowledged);
        } else if (comm_.next_seq_ != a->here.next_seq || place().messages.sent != a->here.messages.sent) {
            status = Status::error(Code::Invalid, "resume on communicator " + spec_.name +
                                                      ": operations were begun while it was under way. Wait for it first");
        } else if (a->noted) {
            status = go_on_from_note(a->tag, a->here);
        } else {
            std::uint64_t number = 0;
            status = find_mark(a->tag, a->here, &number);
            if (status && core_.rules.g2 && !others_of_group().empty()) {
                a->request->outcome = a->gather->outcome;
                resume_with_group(a->request, number, a->here);
                return;
            }
            if (status) status = go_on_from(number, a->here);
        }
    } else if (status.code == Code::Invalid || status.code == Code::LogFull) {
        core_.host.trace("checkpoint.refused");
    }
    a->request->outcome = a->gather->outcome;
    core_.finish(a->request, std::move(status));
}

Status Communicator::Checkpoints::judge(const Agreement& a) const {
    const auto what = a.commits ? "checkpoint " + a.tag : std::string("resume");
    const auto n = spec_.members.size();
    std::vector<int> other, busy, failed, elsewhere, full;
    for (std::size_t r = 0; r < n; ++r) {
        if (a.row(r, Agreement::kTag) != a.row(0, Agreement::kTag)) other.push_back(static_cast<int>(r));
        if (a.row(r, Agreement::kState) == Agreement::kBusy) busy.push_back(static_cast<int>(r));
        if (a.row(r, Agreement::kState) == Agreement::kFailed) failed.push_back(static_cast<int>(r));
        if (a.row(r, Agreement::kState) == Agreement::kElsewhere) elsewhere.push_back(static_cast<int>(r));
        if (a.row(r, Agreement::kState) == Agreement::kFull) full.push_back(static_cast<int>(r));
    }
    if (!other.empty())
        return refused(what + ": ranks " + list_of(other) + " gave another tag. Give the same one on every rank.", other);
    for (std::size_t src = 0; src < n && core_.rules.l3; ++src)
        for (std::size_t dst = 0; dst < n; ++dst) {
            const auto ahead = a.row(src, Agreement::kCounts + dst) - a.row(dst, Agreement::kCounts + n + src);
            if (ahead != 0)
                return refused(what + ": " + std::to_string(ahead) + " message(s) from rank " + std::to_string(src) +
                                   " to rank " + std::to_string(dst) + " have not been received. Receive everything first.",
                               {static_cast<int>(src), static_cast<int>(dst)});
        }
    // Who goes on from there would not know it, and meet the messages that it has left.
    if (!failed.empty())
        return refused(what + ": on ranks " + list_of(failed) +
                           " a ring-logged all_reduce of this communicator has failed. Make another communicator for what comes.",
                       failed);
    if (!busy.empty())
        return refused(what + ": ranks " + list_of(busy) + " have operations that are not done. Wait for all requests first.",
                       busy);
    if (!elsewhere.empty())
        return refused(what + ": ranks " + list_of(elsewhere) +
                           " have used communicators since resume that have no resume point of their own" + used_elsewhere() +
                           ". " + std::string(kHearsAgain),
                       elsewhere);
    if (!full.empty()) {
        auto s = Status::error(Code::LogFull, what + ": the logs of ranks " + list_of(full) +
                                                  " have no room for it. Nothing is lost: make room there, and try again" +
                                                  (a.room ? "" : " (here: " + a.room.message + ")"));
        s.ranks = std::move(full);
        return s;
    }
    return {};
}

// L3, of all communicators together: a process that goes on from here begins anew in those that have no checkpoints.
void Communicator::Checkpoints::note_use() {
    if (marks_ > 0 || used_ == core_.resumes + 1) return;
    used_ = core_.resumes + 1;
    core_.unmarked[spec_.id] = {spec_.name, core_.resumes};
}

void Communicator::Checkpoints::pass_resume_point(std::uint64_t marks) {
    marks_ = marks;
    comm_.pairs_->count_anew(marks_);
    core_.unmarked.erase(spec_.id);
    resumed_ = ++core_.resumes;
}

// Their names; empty if there are none.
std::string Communicator::Checkpoints::used_elsewhere() const {
    std::string names;
    for (const auto& [id, other] : core_.unmarked)
        if (other.used >= resumed_) names += (names.empty() ? " (here: " : ", ") + other.name;
    return names.empty() ? names : names + ")";
}

}  // namespace ftcomm
