// Where a program is in a communicator under replay, and what a rank notes of that: marks, at its resume point and at each checkpoint, and notes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "communicator/logged_pairs.h"

namespace ftcomm {

// A row of an agreement (checkpoint_agreement.cc): what was said of the tag, then how many messages went to each rank, then how many came from each.
inline constexpr std::size_t kAgreementCounts = 3;

struct ProgramPlace {
    std::uint64_t next_seq = 1;
    LoggedPairs::Position messages, ring;
    // Answers may be in the log that this process has not come to yet.
    bool operator==(const ProgramPlace& other) const {
        return next_seq == other.next_seq && messages.same_messages(other.messages) && ring.same_messages(other.ring);
    }
};

struct Mark {
    std::string tag;  // empty: the resume point
    ProgramPlace place, base;  // base: where the resume point was

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

// A place that a rank has noted by itself (notes.cc).
struct Note {
    std::string tag;
    std::uint64_t marks = 0;  // that the program had passed
    ProgramPlace place;
    LoggedPairs::Left left;  // messages before it, to be received after it
    std::vector<LoggedPairs::Asks> asked;  // since the last of these

    Bytes encode() const {
        ByteWriter w;
        w.text(tag).put(marks).put(place.next_seq);
        Mark::put(w, place.messages);
        Mark::put(w, place.ring);
        w.put(static_cast<std::uint32_t>(left.size()));
        for (const auto& from : left) {
            w.put(static_cast<std::uint32_t>(from.size()));
            for (auto n : from) w.put(n);
        }
        w.put(static_cast<std::uint32_t>(asked.size()));
        for (const auto& a : asked) w.put(static_cast<std::int32_t>(a.src)).put(a.tag).put(a.count);
        return w.take();
    }
    static std::optional<Note> decode(ByteView data) {
        ByteReader r(data);
        Note n;
        n.tag = r.text();
        n.marks = r.get<std::uint64_t>();
        n.place.next_seq = r.get<std::uint64_t>();
        n.place.messages = Mark::get(r);
        n.place.ring = Mark::get(r);
        n.left.resize(r.count(4));
        for (auto& from : n.left) {
            from.resize(r.count(8));
            for (auto& seq : from) seq = r.get<std::uint64_t>();
        }
        n.asked.resize(r.count(20));
        for (auto& a : n.asked) {
            a.src = r.get<std::int32_t>();
            a.tag = r.get<std::int64_t>();
            a.count = r.get<std::uint64_t>();
        }
        if (!r.done()) return std::nullopt;
        return n;
    }
};

}  // namespace ftcomm
