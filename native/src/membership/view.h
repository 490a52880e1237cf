// The job view: who is in, as recorded in the head cell "<job>/view". Every change of it is one compare-and-set (M1, M2).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/rank_set.h"
#include "base/status.h"

namespace ftcomm {

struct MemberState {
    std::uint32_t incarnation = 0;
    bool alive = true;
    Evidence evidence = Evidence::None;  // why it is out
    std::uint64_t admission = 0;         // the one that let this incarnation in, 0: there from the start
};

// Where a communicator stands when replacements come in: they start there (M13).
struct AdmitEntry {
    std::uint64_t comm = 0;
    std::uint32_t attempt = 0;
    std::uint64_t next_seq = 0;
    std::uint64_t agree_seq = 0;
    bool revoked = false;
};

struct JobView {
    std::string job;
    std::uint64_t epoch = 0;
    std::uint64_t boot = 0;      // the authority's boot nonce (M3)
    std::uint64_t parent = 0;    // nonce of the view before (lineage, M2)
    std::uint64_t nonce = 0;     // of this record: tells whose compare-and-set won
    std::vector<MemberState> members;
    std::uint64_t admissions = 0;      // how many join points have let somebody in
    RankSet admitted;                  // by the last of them; kept in later views, for whoever learns of it late
    RankSet admit_alive;               // who was in right after it: all start from the same set, whatever happened since
    std::vector<AdmitEntry> admit;
    // Replay: the log group of each slot, fixed at the start. Messages inside a group are not logged. Empty: all are.
    std::vector<std::int32_t> groups;
    // All ranks are on one host, and some share their processors. Fixed at the start: all have to choose the same algorithms (C8).
    bool crowded = false;

    Bytes encode() const;
    static std::optional<JobView> decode(ByteView data);

    static std::optional<std::uint64_t> epoch_of(ByteView data);  // of an encoded one, without the rest

    RankSet alive() const;
    bool is_alive(int slot, std::uint32_t incarnation) const;
    bool same_group(int a, int b) const {
        return !groups.empty() && groups[static_cast<std::size_t>(a)] == groups[static_cast<std::size_t>(b)];
    }
};

}  // namespace ftcomm
