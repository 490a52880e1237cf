#include "channel/spread.h"

#include <algorithm>

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

TreePlace place_in_tree(int n, int position, int degree) {
    FT_CHECK(0 <= position && position < n, "position %d of %d", position, n);
    TreePlace place;
    place.own = {0, n};  // the part that it is in; the first one is its head
    const auto parts_below = [&](const auto& part) {
        for_parts(static_cast<std::size_t>(place.own.begin) + 1, static_cast<std::size_t>(place.own.end), degree,
                  [&](std::size_t begin, std::size_t end) { part(TreePart{static_cast<int>(begin), static_cast<int>(end)}); });
    };
    while (place.own.begin != position) {
        place.parent = place.own.begin;
        auto next = place.own;
        parts_below([&](const TreePart& part) {
            if (part.begin <= position) next = part;
        });
        place.own = next;
    }
    parts_below([&](const TreePart& part) { place.below.push_back(part); });
    return place;
}

SpreadPlace place_in_tree(const RankSet& ranks, int rank, int degree) {
    const auto all = ranks.list();
    FT_CHECK(ranks.has(rank), "rank %d is not in the tree of %s", rank, ranks.text().c_str());
    const auto at = std::lower_bound(all.begin(), all.end(), rank) - all.begin();
    const auto found = place_in_tree(static_cast<int>(all.size()), static_cast<int>(at), degree);
    SpreadPlace place;
    if (found.parent >= 0) place.parent = all[static_cast<std::size_t>(found.parent)];
    for (auto i = found.own.begin; i < found.own.end; ++i) place.part.add(all[static_cast<std::size_t>(i)]);
    return place;
}

}  // namespace ftcomm
