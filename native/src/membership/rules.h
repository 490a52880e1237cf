// The protocol's rules as switches: `ftcomm-sim --mutate C3` builds the protocol without one. All on in production; each
// flag is read at exactly the line that keeps its rule.
#pragma once

#include <string>
#include <vector>

#include "base/check.h"

namespace ftcomm {

struct Rules {
    bool c1 = true;   // freeze at the vote
    bool c2 = true;   // a final carries its contributors
    bool c3 = true;   // a repair has its own fence
    bool c4 = true;   // vote by segment
    bool c5 = true;   // late entrants follow the recorded plan
    bool c6 = true;   // fence-less results are kept
    bool c7 = true;   // the vote decides under raise too
    bool c8 = true;   // the algorithm is part of the operation
    bool c9 = true;   // a read of a peer's memory counts only if its ticket still stands
    bool c10 = true;  // what is lent to the wires is taken back before its operation ends
    bool m1 = true;   // one authority: a lost compare-and-set is not a win
    bool m2 = true;   // lineage: a plan made on an old head is not written over a newer one
    bool m3 = true;   // a restarted, blank store is not the store
    bool m4 = true;   // decide, record, then act
    bool m6 = true;   // reset is no proof
    bool m8 = true;   // frames of removed incarnations and of old attempts are dropped
    bool m10 = true;  // goodbye
    bool m11 = true;  // own silence is not the peers'; complaints wait in proportion
    bool m12 = true;  // suspect per host
    bool m13 = true;  // a newcomer starts where the communicators stand
    bool m14 = true;  // the winner of a view tells all, whoever told it
    bool m16 = true;  // a record is passed on in the view of who sent it
    bool m17 = true;  // a vote for an agree counts in the view it was sent in
    bool l1 = true;   // replay skips what is in the log already, nothing else
    bool l2 = true;   // a restart voids its checkpoint vote: only the mark counts
    bool l3 = true;   // no checkpoint is committed while a message is under way
    bool l4 = true;   // two generations are kept: the newest checkpoint may be damaged
    bool l5 = true;   // answers to receives from ANY are on record
    bool l6 = true;   // what comes before the resume point is never given up
    bool l7 = true;   // what is done again is done by the same owners with the same algorithm
    bool l11 = true;  // a result is logged before its fence begins
    bool l12 = true;  // the last result in the log counts only when the vote says so
    bool l13 = true;  // given up is only what a checkpoint made superfluous that all have acknowledged
    bool l14 = true;  // a mark in the log proves that all agreed on it
    bool l15 = true;  // nothing is late beyond a mark
    bool l16 = true;  // a note proves what comes before it, and holds only with all of that in the log
    bool g1 = true;   // who dies takes its log group along
    bool g2 = true;   // a log group goes on from one checkpoint

    static Rules without(const std::vector<std::string>& names) {
        Rules r;
        for (const auto& n : names) {
            bool* flag = n == "C1"    ? &r.c1
                         : n == "C2"  ? &r.c2
                         : n == "C3"  ? &r.c3
                         : n == "C4"  ? &r.c4
                         : n == "C5"  ? &r.c5
                         : n == "C6"  ? &r.c6
                         : n == "C7"  ? &r.c7
                         : n == "C8"  ? &r.c8
                         : n == "C9"  ? &r.c9
                         : n == "C10" ? &r.c10
                         : n == "M1"  ? &r.m1
                         : n == "M2"  ? &r.m2
                         : n == "M3"  ? &r.m3
                         : n == "M4"  ? &r.m4
                         : n == "M6"  ? &r.m6
                         : n == "M8"  ? &r.m8
                         : n == "M10" ? &r.m10
                         : n == "M11" ? &r.m11
                         : n == "M12" ? &r.m12
                         : n == "M13" ? &r.m13
                         : n == "M14" ? &r.m14
                         : n == "M16" ? &r.m16
                         : n == "M17" ? &r.m17
                         : n == "L1"  ? &r.l1
                         : n == "L2"  ? &r.l2
                         : n == "L3"  ? &r.l3
                         : n == "L4"  ? &r.l4
                         : n == "L5"  ? &r.l5
                         : n == "L6"  ? &r.l6
                         : n == "L7"  ? &r.l7
                         : n == "L11" ? &r.l11
                         : n == "L12" ? &r.l12
                         : n == "L14" ? &r.l14
                         : n == "L15" ? &r.l15
                         : n == "L16" ? &r.l16
                         : n == "L13" ? &r.l13
                         : n == "G1"  ? &r.g1
                         : n == "G2"  ? &r.g2
                                      : nullptr;
            FT_CHECK(flag != nullptr, "no removable rule named %s", n.c_str());
            *flag = false;
        }
        return r;
    }
};

}  // namespace ftcomm
