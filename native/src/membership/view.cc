#include "membership/view.h"

namespace ftcomm {

namespace {
constexpr std::uint32_t kViewMagic = 0x77765446;  // "FTvw"
}

Bytes JobView::encode() const {
    ByteWriter w;
    w.put(kViewMagic).text(job).put(epoch).put(boot).put(parent).put(nonce);
    w.put(static_cast<std::uint32_t>(members.size()));
    for (const auto& m : members) {
        w.put(m.incarnation);
        w.put(static_cast<std::uint8_t>(m.alive));
        w.put(m.evidence);
        w.put(m.admission);
    }
    w.put(admissions).ranks(admitted).ranks(admit_alive);
    w.put(static_cast<std::uint32_t>(admit.size()));
    for (const auto& a : admit)
        w.put(a.comm).put(a.attempt).put(a.next_seq).put(a.agree_seq).put(static_cast<std::uint8_t>(a.revoked));
    w.put(static_cast<std::uint32_t>(groups.size()));
    for (auto g : groups) w.put(g);
    w.put(static_cast<std::uint8_t>(crowded));
    return w.take();
}

std::optional<JobView> JobView::decode(ByteView data) {
    ByteReader r(data);
    if (r.get<std::uint32_t>() != kViewMagic) return std::nullopt;
    JobView v;
    v.job = r.text();
    v.epoch = r.get<std::uint64_t>();
    v.boot = r.get<std::uint64_t>();
    v.parent = r.get<std::uint64_t>();
    v.nonce = r.get<std::uint64_t>();
    v.members.resize(r.count(14));
    if (v.members.size() > static_cast<std::size_t>(kMaxRanks)) return std::nullopt;
    for (auto& m : v.members) {
        m.incarnation = r.get<std::uint32_t>();
        m.alive = r.get<std::uint8_t>() != 0;
        m.evidence = r.get<Evidence>();
        m.admission = r.get<std::uint64_t>();
    }
    v.admissions = r.get<std::uint64_t>();
    v.admitted = r.ranks();
    v.admit_alive = r.ranks();
    v.admit.resize(r.count(29));
    for (auto& a : v.admit) {
        a.comm = r.get<std::uint64_t>();
        a.attempt = r.get<std::uint32_t>();
        a.next_seq = r.get<std::uint64_t>();
        a.agree_seq = r.get<std::uint64_t>();
        a.revoked = r.get<std::uint8_t>() != 0;
    }
    v.groups.resize(r.count(4));
    for (auto& g : v.groups) g = r.get<std::int32_t>();
    v.crowded = r.get<std::uint8_t>() != 0;
    if (!r.done() || (!v.groups.empty() && v.groups.size() != v.members.size())) return std::nullopt;
    return v;
}

std::optional<std::uint64_t> JobView::epoch_of(ByteView data) {
    ByteReader r(data);
    if (r.get<std::uint32_t>() != kViewMagic) return std::nullopt;
    r.text();
    const auto epoch = r.get<std::uint64_t>();
    return r.ok() ? std::optional(epoch) : std::nullopt;
}

RankSet JobView::alive() const {
    RankSet s;
    for (std::size_t i = 0; i < members.size(); ++i)
        if (members[i].alive) s.add(static_cast<int>(i));
    return s;
}

bool JobView::is_alive(int slot, std::uint32_t incarnation) const {
    const auto& m = members[static_cast<std::size_t>(slot)];
    return m.alive && m.incarnation == incarnation;
}

}  // namespace ftcomm
