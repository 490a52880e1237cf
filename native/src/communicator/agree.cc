#include "communicator/agree.h"

#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "communicator/announce.h"

namespace ftcomm {

RequestPtr Communicator::Agreeing::post(AgreeKind kind, std::int64_t flag) {
    auto request = std::make_shared<Request>();
    if (auto s = comm_.dead_end(); !s) {
        core_.finish(request, std::move(s));
        return request;
    }
    if (comm_.replays()) {
        core_.finish(request, Status::error(Code::Unsupported,
                                            "there is nothing to agree on under the policy replay: a rank that dies comes back. "
                                            "Use all_reduce to combine flags"));
        return request;
    }
    if (is_open()) {
        core_.finish(request,
                     Status::error(Code::Invalid, "an agree or shrink is already under way on this communicator; wait for it"));
        return request;
    }
    if (core_.solo) {
        core_.finish(request,
                     Status::error(Code::Unsupported, "this replacement is not admitted yet: call the join point first"));
        return request;
    }
    request_ = request;
    held_ = core_.admitting;
    mine_ = {comm_.decision_.agree_seq + 1, kind, flag, comm_.acked_};
    if (!held_) send_vote();
    return request;
}

void Communicator::Agreeing::try_to() {
    if (comm_.cas_busy_ || comm_.excluded_ || comm_.leader() != rank_ || !comm_.dead_end()) return;
    const auto want = comm_.voters();
    const auto seq = comm_.decision_.agree_seq + 1;
    Decision d = comm_.decision_;
    d.agree_value = -1;
    d.agree_cause = {};
    RankSet acked_by_all = RankSet::first(static_cast<int>(spec_.members.size()));
    AgreeKind kind = AgreeKind::Agree;
    bool first = true, mixed = false;
    for (int r : want.list()) {
        const auto it = votes_.find(r);
        if (it == votes_.end() || it->second.seq != seq) return;
        const auto& v = it->second;
        mixed |= !first && v.kind != kind;
        kind = v.kind;
        first = false;
        d.agree_value &= v.flag;
        acked_by_all = acked_by_all & v.acked;
    }
    const auto unknown = comm_.failed() - acked_by_all;
    if (mixed) {
        d.agree_cause.code = Code::Mismatch;
        d.agree_cause.epoch = core_.view.epoch;
        d.agree_cause.message = "some ranks called agree() and others shrink() at the same point";
    } else if (kind == AgreeKind::Agree && !unknown.empty()) {
        d.agree_cause = peer_failure(unknown, comm_.evidence(), core_.view.epoch,
                                     "the flag was agreed all the same; ack_failed() says that you know");
    }
    d.agree_seq = seq;
    d.agree_survivors = want;
    d.nonce = core_.random();
    d.epoch = core_.view.epoch;
    d.admissions = core_.view.admissions;
    auto bytes = d.encode();
    comm_.cas_busy_ = true;
    core_.host.trace(kind == AgreeKind::Agree ? "agree" : "shrink");
    FT_POINT(kind == AgreeKind::Agree ? "agree.before" : "shrink.before");
    core_.cells.compare_and_set(
        comm_.cell_key(), comm_.record_, bytes, [this, bytes, kind](CellClient::Result result, const Bytes& value) {
            comm_.cas_busy_ = false;
            if (!comm_.dead_end()) return;
            if (result == CellClient::Result::Lost) {
                core_.authority_lost = true;
                return;
            }
            if (result == CellClient::Result::Swapped) {
                FT_POINT(kind == AgreeKind::Agree ? "agree.after" : "shrink.after");
                comm_.announcements_->announce(bytes, FrameKind::AgreeResult);
                comm_.adopt(bytes);
            } else {
                core_.host.trace("agree.conflict");
                const auto current = Decision::decode(value);
                FT_CHECK(current.has_value(), "the head cell of communicator %s does not hold a decision", spec_.name.c_str());
                if (comm_.outdated(*current) ||
                    (current->attempt <= comm_.attempt_ && current->agree_seq <= comm_.decision_.agree_seq)) {
                    comm_.record_ = value;  // ours of an earlier time: a replacement that leads for the first time
                } else if (comm_.excludes_this_rank(*current)) {
                    comm_.on_excluded();
                } else {
                    comm_.announcements_->announce(value, FrameKind::Decision);
                    comm_.adopt(value);
                }
            }
            try_to();
            comm_.try_decide();
        });
}

void Communicator::Agreeing::finish() {
    std::erase_if(votes_, [&](const auto& v) { return v.second.seq <= comm_.decision_.agree_seq; });
    sent_ = false;
    if (!is_open() || held_ || mine_.seq > comm_.decision_.agree_seq) return;
    FT_CHECK(mine_.seq == comm_.decision_.agree_seq, "agreement %llu was decided while this rank still waits for %llu",
             static_cast<unsigned long long>(comm_.decision_.agree_seq), static_cast<unsigned long long>(mine_.seq));
    const auto mine = std::exchange(request_, nullptr);
    auto& request = *mine;
    request.value = comm_.decision_.agree_value;
    request.survivors = comm_.decision_.agree_survivors;
    ByteWriter w;
    w.put(spec_.id).put(comm_.decision_.agree_seq);
    request.new_comm = hash64(w.view());
    const std::string what = std::string(mine_.kind == AgreeKind::Agree ? "agree" : "shrink") + " #" +
                             std::to_string(comm_.decision_.agree_seq) + " of communicator " + spec_.name;
    core_.finish(mine, comm_.decision_.agree_cause.code == Code::Ok ? Status{} : comm_.decision_.agree_cause.status(what));
}

void Communicator::Agreeing::resume() {
    if (!held_ || core_.admitting) return;
    held_ = false;
    mine_.seq = comm_.decision_.agree_seq + 1;
    mine_.acked = comm_.acked_;
    send_vote();
}

void Communicator::Agreeing::on_view() {
    if (is_open() && !held_) send_vote();
    try_to();
}

void Communicator::Agreeing::fail(const Status& status) {
    if (is_open()) core_.finish(std::exchange(request_, nullptr), status);
}

}  // namespace ftcomm
