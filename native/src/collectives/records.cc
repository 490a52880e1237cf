#include "collectives/records.h"

#include <cstdio>

namespace ftcomm {

const char* to_string(OpKind kind) {
    switch (kind) {
        case OpKind::AllReduce: return "all_reduce";
        case OpKind::Broadcast: return "broadcast";
        case OpKind::Reduce: return "reduce";
        case OpKind::AllGather: return "all_gather";
        case OpKind::ReduceScatter: return "reduce_scatter";
        case OpKind::Gather: return "gather";
        case OpKind::Scatter: return "scatter";
        case OpKind::AllToAll: return "all_to_all";
        case OpKind::Barrier: return "barrier";
    }
    return "unknown";
}

std::uint64_t Shape::signature() const {
    ByteWriter w;
    encode(w);
    return hash64(w.view());
}

std::string Shape::text() const {
    std::string s = to_string(kind);
    if (kind == OpKind::Barrier) return s;
    s += "(";
    s += to_string(dtype);
    if (!is_direct() || count > 0) s += "[" + std::to_string(count) + "]";
    if (reduces(kind)) {
        s += ", ";
        s += to_string(op);
    }
    if (has_root()) s += ", root " + std::to_string(root);
    return s + ")";
}

void Shape::encode(ByteWriter& w) const {
    w.put(kind).put(dtype).put(op).put(algorithm).put(root).put(count).put(factor).put(blocks).put(per_block);
}

Shape Shape::decode(ByteReader& r) {
    Shape s;
    s.kind = r.get<OpKind>();
    s.dtype = r.get<DType>();
    s.op = r.get<ReduceOp>();
    s.algorithm = r.get<Algorithm>();
    s.root = r.get<std::int32_t>();
    s.count = r.get<std::uint64_t>();
    s.factor = r.get<double>();
    s.blocks = r.get<std::uint32_t>();
    s.per_block = r.get<std::uint32_t>();
    return s;
}

namespace {

void encode_numbers(ByteWriter& w, const std::vector<std::uint32_t>& numbers) {
    w.put(static_cast<std::uint32_t>(numbers.size()));
    for (auto n : numbers) w.put(n);
}

std::vector<std::uint32_t> decode_numbers(ByteReader& r) {
    std::vector<std::uint32_t> out(r.count(4));
    for (auto& n : out) n = r.get<std::uint32_t>();
    return out;
}

}  // namespace

void Vote::encode(ByteWriter& w) const {
    w.put(attempt).put(done_seq).put(logged).put(known_done).put(view_epoch).put(inherited).put(revoked_from);
    encode_failures(w, failures);
    w.put(static_cast<std::uint32_t>(ops.size()));
    for (const auto& o : ops) {
        w.put(o.seq).put(o.state).put(static_cast<std::uint8_t>(o.retained));
        o.shape.encode(w);
        w.put(static_cast<std::uint32_t>(o.labels.size()));
        for (const auto& l : o.labels) {
            w.put(l.count).put(l.kind);
            if (l.kind == LabelKind::Final) w.ranks(l.contributors);
        }
    }
    w.put(static_cast<std::uint32_t>(proposals.size()));
    for (const auto& p : proposals) w.put(p.code).put(p.seq);
    encode_numbers(w, log_since);
    unrun.encode(w);
}

std::optional<Vote> Vote::decode(ByteReader& r) {
    Vote v;
    v.attempt = r.get<std::uint32_t>();
    v.done_seq = r.get<std::uint64_t>();
    v.logged = r.get<std::uint64_t>();
    v.known_done = r.get<std::uint64_t>();
    v.view_epoch = r.get<std::uint64_t>();
    v.inherited = r.get<std::uint64_t>();
    v.revoked_from = r.get<std::uint64_t>();
    v.failures = decode_failures(r);
    v.ops.resize(r.count(10));
    for (auto& o : v.ops) {
        o.seq = r.get<std::uint64_t>();
        o.state = r.get<OpVote::State>();
        o.retained = r.get<std::uint8_t>() != 0;
        o.shape = Shape::decode(r);
        o.labels.resize(r.count(5));
        std::uint64_t total = 0;
        for (auto& l : o.labels) {
            l.count = r.get<std::uint32_t>();
            l.kind = r.get<LabelKind>();
            if (l.kind == LabelKind::Final) l.contributors = r.ranks();
            total += l.count;
        }
        const auto expected = std::uint64_t{o.shape.blocks} * o.shape.per_block;
        if (o.state == OpVote::State::Open && !o.shape.is_direct() && total != expected) return std::nullopt;
    }
    v.proposals.resize(r.count(9));
    for (auto& p : v.proposals) {
        p.code = r.get<Code>();
        p.seq = r.get<std::uint64_t>();
    }
    v.log_since = decode_numbers(r);
    v.unrun = SeqRuns::decode(r);
    if (!r.ok()) return std::nullopt;
    return v;
}

void Cause::encode(ByteWriter& w) const {
    w.put(code).text(message).put(epoch);
    w.put(static_cast<std::uint32_t>(ranks.size()));
    for (auto x : ranks) w.put(x);
    w.put(static_cast<std::uint32_t>(evidence.size()));
    for (auto e : evidence) w.put(e);
}

Cause Cause::decode(ByteReader& r) {
    Cause c;
    c.code = r.get<Code>();
    c.message = r.text();
    c.epoch = r.get<std::uint64_t>();
    c.ranks.resize(r.count(4));
    for (auto& x : c.ranks) x = r.get<std::int32_t>();
    c.evidence.resize(r.count(1));
    for (auto& e : c.evidence) e = r.get<Evidence>();
    return c;
}

Cause Cause::of(const Status& status) {
    Cause c;
    c.code = status.code;
    c.message = status.message;
    c.ranks.assign(status.ranks.begin(), status.ranks.end());
    c.evidence = status.evidence;
    c.epoch = status.epoch;
    return c;
}

Status Cause::status(const std::string& operation) const {
    Status s = Status::error(code, operation.empty() ? message : operation + ": " + message);
    s.operation = operation;
    s.ranks.assign(ranks.begin(), ranks.end());
    s.evidence = evidence;
    s.epoch = epoch;
    return s;
}

const OpPlan* Decision::plan_for(std::uint64_t seq) const {
    for (const auto& p : plans)
        if (p.seq == seq) return &p;
    return nullptr;
}

namespace {
constexpr std::uint32_t kDecisionMagic = 0x64635446;  // "FTcd"
}

Bytes Decision::encode() const {
    ByteWriter w;
    w.put(kDecisionMagic)
        .put(attempt)
        .put(nonce)
        .put(epoch)
        .put(admissions)
        .ranks(alive)
        .put(static_cast<std::uint8_t>(frames_only))
        .put(static_cast<std::uint8_t>(no_windows))
        .put(static_cast<std::uint8_t>(revoked))
        .put(revoked_from)
        .put(fail_from);
    cause.encode(w);
    w.put(static_cast<std::uint32_t>(plans.size()));
    for (const auto& p : plans) {
        w.put(p.seq).put(p.verdict).put(static_cast<std::uint8_t>(p.settled));
        p.cause.encode(w);
        p.shape.encode(w);
        w.put(static_cast<std::uint32_t>(p.runs.size()));
        for (const auto& x : p.runs) w.put(x.count).put(x.mode).put(x.rank).ranks(x.contributors);
    }
    encode_failures(w, failures);
    encode_numbers(w, log_since);
    w.put(done_through).put(agree_seq).put(agree_value);
    agree_cause.encode(w);
    w.ranks(agree_survivors);
    return w.take();
}

std::optional<Decision> Decision::decode(ByteView data) {
    ByteReader r(data);
    if (r.get<std::uint32_t>() != kDecisionMagic) return std::nullopt;
    Decision d;
    d.attempt = r.get<std::uint32_t>();
    d.nonce = r.get<std::uint64_t>();
    d.epoch = r.get<std::uint64_t>();
    d.admissions = r.get<std::uint64_t>();
    d.alive = r.ranks();
    d.frames_only = r.get<std::uint8_t>() != 0;
    d.no_windows = r.get<std::uint8_t>() != 0;
    d.revoked = r.get<std::uint8_t>() != 0;
    d.revoked_from = r.get<std::uint64_t>();
    d.fail_from = r.get<std::uint64_t>();
    d.cause = Cause::decode(r);
    d.plans.resize(r.count(20));
    for (auto& p : d.plans) {
        p.seq = r.get<std::uint64_t>();
        p.verdict = r.get<OpPlan::Verdict>();
        p.settled = r.get<std::uint8_t>() != 0;
        p.cause = Cause::decode(r);
        p.shape = Shape::decode(r);
        p.runs.resize(r.count(10));
        for (auto& x : p.runs) {
            x.count = r.get<std::uint32_t>();
            x.mode = r.get<SegmentMode>();
            x.rank = r.get<std::int32_t>();
            x.contributors = r.ranks();
        }
    }
    d.failures = decode_failures(r);
    d.log_since = decode_numbers(r);
    d.done_through = r.get<std::uint64_t>();
    d.agree_seq = r.get<std::uint64_t>();
    d.agree_value = r.get<std::int64_t>();
    d.agree_cause = Cause::decode(r);
    d.agree_survivors = r.ranks();
    if (!r.done()) return std::nullopt;
    return d;
}

void encode_failures(ByteWriter& w, const std::vector<Failure>& failures) {
    w.put(static_cast<std::uint32_t>(failures.size()));
    for (const auto& f : failures) {
        w.put(f.seq);
        f.cause.encode(w);
    }
}

std::vector<Failure> decode_failures(ByteReader& r) {
    std::vector<Failure> out(r.count(25));
    for (auto& f : out) {
        f.seq = r.get<std::uint64_t>();
        f.cause = Cause::decode(r);
    }
    return out;
}

void encode_spec(ByteWriter& w, const CommSpec& spec) {
    w.put(spec.id).text(spec.name).put(spec.policy).put(spec.timeout);
    w.put(static_cast<std::uint32_t>(spec.members.size()));
    for (int m : spec.members) w.put(static_cast<std::int32_t>(m));
}

CommSpec decode_spec(ByteReader& r) {
    CommSpec s;
    s.id = r.get<std::uint64_t>();
    s.name = r.text();
    s.policy = r.get<Policy>();
    s.timeout = r.get<Time>();
    s.members.resize(r.count(4));
    for (auto& m : s.members) m = r.get<std::int32_t>();
    return s;
}

}  // namespace ftcomm
