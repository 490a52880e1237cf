// agree and shrink: every living member's word, one compare-and-set, then the announcement. They work on broken and revoked
// communicators, and touch no operation. (ULFM: Bland et al. 2013; here the head cell takes the place of a consensus protocol.)
#include "base/check.h"
#include "base/failpoint.h"
#include "communicator/communicator.h"

namespace ftcomm {

RequestPtr Communicator::agree(AgreeKind kind, std::int64_t flag) {
    auto request = std::make_shared<Request>();
    if (auto s = dead_end(); !s) {
        core_.finish(request, std::move(s));
        return request;
    }
    if (replays()) {
        core_.finish(request, Status::error(Code::Unsupported,
                                            "there is nothing to agree on under the policy replay: a rank that dies comes back. "
                                            "Use all_reduce to combine flags"));
        return request;
    }
    if (agree_.active) {
        core_.finish(request,
                     Status::error(Code::Invalid, "an agree or shrink is already under way on this communicator; wait for it"));
        return request;
    }
    if (core_.solo) {
        core_.finish(request,
                     Status::error(Code::Unsupported, "this replacement is not admitted yet: call the join point first"));
        return request;
    }
    agree_ = {true, core_.admitting, {decision_.agree_seq + 1, kind, flag, acked_}, request};
    if (!agree_.held) send_agree_vote();
    return request;
}

void Communicator::try_agree() {
    if (cas_busy_ || excluded_ || leader() != rank_ || !dead_end()) return;
    const auto want = voters();
    const auto seq = decision_.agree_seq + 1;
    Decision d = decision_;
    d.agree_value = -1;
    d.agree_cause = {};
    RankSet acked_by_all = RankSet::first(static_cast<int>(spec_.members.size()));
    AgreeKind kind = AgreeKind::Agree;
    bool first = true, mixed = false;
    for (int r : want.list()) {
        const auto it = agree_votes_.find(r);
        if (it == agree_votes_.end() || it->second.seq != seq) return;
        const auto& v = it->second;
        mixed |= !first && v.kind != kind;
        kind = v.kind;
        first = false;
        d.agree_value &= v.flag;
        acked_by_all = acked_by_all & v.acked;
    }
    const auto unknown = failed() - acked_by_all;
    if (mixed) {
        d.agree_cause.code = Code::Mismatch;
        d.agree_cause.epoch = core_.view.epoch;
        d.agree_cause.message = "some ranks called agree() and others shrink() at the same point";
    } else if (kind == AgreeKind::Agree && !unknown.empty()) {
        d.agree_cause = peer_failure(unknown, evidence(), core_.view.epoch,
                                     "the flag was agreed all the same; ack_failed() says that you know");
    }
    d.agree_seq = seq;
    d.agree_survivors = want;
    d.nonce = core_.random();
    d.epoch = core_.view.epoch;
    d.admissions = core_.view.admissions;
    auto bytes = d.encode();
    cas_busy_ = true;
    core_.host.trace(kind == AgreeKind::Agree ? "agree" : "shrink");
    FT_POINT(kind == AgreeKind::Agree ? "agree.before" : "shrink.before");
    core_.cells.compare_and_set(cell_key(), record_, bytes, [this, bytes, kind](CellClient::Result result, const Bytes& value) {
        cas_busy_ = false;
        if (!dead_end()) return;
        if (result == CellClient::Result::Lost) {
            core_.authority_lost = true;
            return;
        }
        if (result == CellClient::Result::Swapped) {
            FT_POINT(kind == AgreeKind::Agree ? "agree.after" : "shrink.after");
            announce(bytes, FrameKind::AgreeResult);
            adopt(bytes);
        } else {
            core_.host.trace("agree.conflict");
            const auto current = Decision::decode(value);
            FT_CHECK(current.has_value(), "the head cell of communicator %s does not hold a decision", spec_.name.c_str());
            if (outdated(*current) || (current->attempt <= attempt_ && current->agree_seq <= decision_.agree_seq)) {
                record_ = value;  // ours of an earlier time: a replacement that leads for the first time
            } else if (excludes_this_rank(*current)) {
                on_excluded();
            } else {
                announce(value, FrameKind::Decision);
                adopt(value);
            }
        }
        try_agree();
        try_decide();
    });
}

void Communicator::finish_agree() {
    std::erase_if(agree_votes_, [&](const auto& v) { return v.second.seq <= decision_.agree_seq; });
    agree_votes_sent_ = false;
    if (!agree_.active || agree_.held || agree_.vote.seq > decision_.agree_seq) return;
    FT_CHECK(agree_.vote.seq == decision_.agree_seq, "agreement %llu was decided while this rank still waits for %llu",
             static_cast<unsigned long long>(decision_.agree_seq), static_cast<unsigned long long>(agree_.vote.seq));
    agree_.active = false;
    auto& request = *agree_.request;
    request.value = decision_.agree_value;
    request.survivors = decision_.agree_survivors;
    ByteWriter w;
    w.put(spec_.id).put(decision_.agree_seq);
    request.new_comm = hash64(w.view());
    const std::string what = std::string(agree_.vote.kind == AgreeKind::Agree ? "agree" : "shrink") + " #" +
                             std::to_string(decision_.agree_seq) + " of communicator " + spec_.name;
    auto held = agree_.request;
    core_.finish(held, decision_.agree_cause.code == Code::Ok ? Status{} : decision_.agree_cause.status(what));
}

}  // namespace ftcomm
