// One record to many ranks, along a tree: whoever gets it passes it on to a part of those that are left. So nobody sends more than
// `degree` frames, and the last one has it after about log(n) of them, one after another; up to so many ranks, each gets it from the first.
//
// Who is to have it travels along, so it makes no difference what the ranks on its way know of each other. What a rank does not pass on,
// because it dies, is lost: its death is news itself, and who waits for a record asks for it again after each change of the view.
#pragma once

#include <vector>

#include "base/bytes.h"

namespace ftcomm {

// More frames for each rank, or more ranks one after another: 1,000 ranks are three steps apart.
inline constexpr int kSpreadDegree = 16;

struct Spread {
    RankSet rest;  // slots to which its receiver passes it on
    ByteView record;

    // False: it is none.
    static bool decode(ByteView payload, Spread* out);
    static ByteView record_of(ByteView payload) {
        Spread s;
        return decode(payload, &s) ? s.record : ByteView();
    }
};

struct SpreadFrame {
    int slot;
    Bytes payload;
};
// In their order: whoever passes it on comes before those who get it from there.
std::vector<SpreadFrame> spread(ByteView record, const std::vector<int>& slots, int degree);
// To one slot, which passes it on to nobody.
Bytes spread_to_one(ByteView record);

// The same tree for what comes together: positions 0 to n-1, the first one at the root; each part begins with its head.
struct TreePart {
    int begin = 0, end = 0;
};
struct TreePlace {
    int parent = -1;  // -1: this is the root
    TreePart own;  // this position, and all whose records come through it
    std::vector<TreePart> below;
};
TreePlace place_in_tree(int n, int position, int degree);
// The same of `ranks` in order.
struct SpreadPlace {
    int parent = -1;  // -1: this rank is the root
    RankSet part;  // this rank, and all whose records come through it
};
SpreadPlace place_in_tree(const RankSet& ranks, int rank, int degree);

}  // namespace ftcomm
