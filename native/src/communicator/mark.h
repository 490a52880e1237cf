// What a rank notes at its resume point and at each checkpoint.
#pragma once

#include <optional>
#include <string>

#include "communicator/communicator.h"

namespace ftcomm {

// A row of an agreement (agreement.cc): what was said of the tag, then how many messages went to each rank, then how many came from each.
inline constexpr std::size_t kAgreementCounts = 3;

struct Communicator::Mark {
    std::string tag;  // empty: the resume point
    Place place, base;  // base: where the resume point was

    static void put(ByteWriter& w, const LoggedPairs::Position& p) {
        w.put(static_cast<std::uint32_t>(p.sent.size()));
        for (auto n : p.sent) w.put(n);
        for (auto n : p.received) w.put(n);
        w.put(p.answers);
    }
    static LoggedPairs::Position get(ByteReader& r) {
        LoggedPairs::Position p;
        const auto n = r.count(16);
        for (std::uint32_t i = 0; i < n; ++i) p.sent.push_back(r.get<std::uint64_t>());
        for (std::uint32_t i = 0; i < n; ++i) p.received.push_back(r.get<std::uint64_t>());
        p.answers = r.get<std::uint64_t>();
        return p;
    }
    Bytes encode() const {
        ByteWriter w;
        w.text(tag);
        for (const auto* p : {&place, &base}) {
            w.put(p->next_seq);
            put(w, p->messages);
            put(w, p->ring);
        }
        return w.take();
    }
    static std::optional<Mark> decode(ByteView data) {
        ByteReader r(data);
        Mark m;
        m.tag = r.text();
        for (auto* p : {&m.place, &m.base}) {
            p->next_seq = r.get<std::uint64_t>();
            p->messages = get(r);
            p->ring = get(r);
        }
        if (!r.done()) return std::nullopt;
        return m;
    }
};

}  // namespace ftcomm
