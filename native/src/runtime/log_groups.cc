#include "runtime/log_groups.h"

#include <algorithm>
#include <charconv>
#include <sstream>

namespace ftcomm {

Status LogGroups::parse(const std::string& text, int world_size, LogGroups* out) {
    *out = {};
    if (text.empty() || text == "all") return {};
    if (text == "inter-host") {
        out->inter_host = true;
        out->text = text;
        return {};
    }
    const auto refuse = [&](const std::string& why) {
        return Status::error(Code::Invalid,
                             "log \"" + text + "\": " + why + R"(. Give "all", "inter-host", or groups as in "0,1/2,3")");
    };
    out->of.assign(static_cast<std::size_t>(world_size), -1);
    std::int32_t number = 0;
    std::istringstream groups(text);
    for (std::string group; std::getline(groups, group, '/'); ++number) {
        std::istringstream ranks(group);
        for (std::string word; std::getline(ranks, word, ',');) {
            int rank = -1;
            const auto end = word.data() + word.size();
            const auto read = std::from_chars(word.data(), end, rank);
            if (read.ec != std::errc() || read.ptr != end) return refuse("\"" + word + "\" is no rank");
            if (rank < 0 || rank >= world_size)
                return refuse("rank " + word + " is not below the world size " + std::to_string(world_size));
            auto& mine = out->of[static_cast<std::size_t>(rank)];
            if (mine >= 0) return refuse("rank " + word + " is listed twice");
            mine = number;
        }
    }
    // Named by their lowest rank: the same groups, in whatever order they are given, are the same.
    std::string canonical;
    for (int r = 0; r < world_size; ++r) {
        auto& mine = out->of[static_cast<std::size_t>(r)];
        if (mine < 0) mine = number++;
        const auto first = std::find(out->of.begin(), out->of.begin() + r, mine);
        if (first != out->of.begin() + r) continue;
        canonical += canonical.empty() ? "" : "/";
        for (int other = r; other < world_size; ++other)
            if (other == r || out->of[static_cast<std::size_t>(other)] == mine)
                canonical += (other == r ? "" : ",") + std::to_string(other);
    }
    out->text = canonical;
    return {};
}

}  // namespace ftcomm
