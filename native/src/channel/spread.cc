#include "channel/spread.h"

#include <algorithm>
#include <tuple>

#include "base/check.h"

namespace ftcomm {

namespace {

// The parts of [begin, end): neighbours go together, as they are often on one host.
template <class Part>
void for_parts(std::size_t begin, std::size_t end, int degree, const Part& part) {
    FT_CHECK(degree > 0, "a tree of degree %d", degree);
    const auto size = end - begin, parts = std::min(static_cast<std::size_t>(degree), size);
    for (std::size_t i = 0; i < parts; ++i) part(begin + i * size / parts, begin + (i + 1) * size / parts);
}

}  // namespace

bool Spread::decode(ByteView payload, Spread* out) {
    ByteReader r(payload);
    out->rest = r.ranks();
    out->record = r.left();
    return r.ok();
}

std::vector<SpreadFrame> spread(ByteView record, const std::vector<int>& slots, int degree) {
    std::vector<SpreadFrame> out;
    for_parts(0, slots.size(), degree, [&](std::size_t begin, std::size_t end) {
        RankSet rest;
        for (auto i = begin + 1; i < end; ++i) rest.add(slots[i]);
        ByteWriter w;
        w.ranks(rest).raw(record);
        out.push_back({slots[begin], w.take()});
    });
    return out;
}

Bytes spread_to_one(ByteView record) {
    ByteWriter w;
    w.ranks({}).raw(record);
    return w.take();
}

SpreadPlace place_in_tree(const RankSet& ranks, int rank, int degree) {
    const auto all = ranks.list();
    std::size_t begin = 0, end = all.size();  // the part that this rank is in; its first one is its head
    SpreadPlace place;
    while (begin < end && all[begin] != rank) {
        place.parent = all[begin];
        auto next = std::pair(end, end);
        for_parts(begin + 1, end, degree, [&](std::size_t b, std::size_t e) {
            if (all[b] <= rank) next = {b, e};
        });
        std::tie(begin, end) = next;
    }
    FT_CHECK(begin < end, "rank %d is not in the tree of %s", rank, ranks.text().c_str());
    for (auto i = begin; i < end; ++i) place.part.add(all[i]);
    return place;
}

}  // namespace ftcomm
