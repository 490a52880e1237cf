#include "base/failpoint_spec.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <string_view>

#include "base/failpoint_table.h"
#include "base/joined.h"
#include "base/rank_set.h"

namespace ftcomm::fault {

namespace {

constexpr double kDay = 86400;
constexpr const char* kDeeds = "kill, stop:SECONDS, exit:CODE, delay:MS, corrupt, cut:RANK";

std::string_view trim(std::string_view s) {
    const auto first = s.find_first_not_of(" \t\n\r");
    if (first == std::string_view::npos) return {};
    return s.substr(first, s.find_last_not_of(" \t\n\r") - first + 1);
}

std::vector<std::string_view> split(std::string_view s, char separator) {
    std::vector<std::string_view> out;
    for (;;) {
        const auto at = s.find(separator);
        out.push_back(trim(s.substr(0, at)));
        if (at == std::string_view::npos) return out;
        s.remove_prefix(at + 1);
    }
}

std::string quoted(std::string_view s) { return "\"" + std::string(s) + "\""; }

Status bad(std::string_view part, const std::string& why) {
    return Status::error(Code::Invalid, "FTCOMM_FAULTS: " + quoted(part) + ": " + why);
}

template <class T>
bool number(std::string_view s, T low, T high, T* out) {
    T value{};
    const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
    // A NaN fails both comparisons.
    if (error != std::errc() || end != s.data() + s.size() || !(value >= low && value <= high)) return false;
    *out = value;
    return true;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::size_t diagonal = row[0];
        row[0] = i;
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const std::size_t above = row[j];
            row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0u : 1u)});
            diagonal = above;
        }
    }
    return row.back();
}

Status parse_rank(std::string_view part, std::string_view value, Fault* fault) {
    const auto dot = value.find('.');
    if (!number(value.substr(0, dot), 0, kMaxRanks - 1, &fault->rank))
        return bad(part, "the rank must be a number from 0 to " + std::to_string(kMaxRanks - 1) + " (or R.I for incarnation I)");
    if (dot != std::string_view::npos && !number(value.substr(dot + 1), 0, 1'000'000, &fault->incarnation))
        return bad(part, "after the dot comes the incarnation, a number: rank=2.1 is the first replacement of rank 2");
    return {};
}

Status parse_point(std::string_view part, std::string_view value, Fault* fault) {
    const auto colon = value.find(':');
    const std::string name(trim(value.substr(0, colon)));
    fault->point = find_point(name);
    if (fault->point < 0) {
        const auto near = joined(near_points(name));
        return bad(part, "no failpoint is called " + quoted(name) + (near.empty() ? "" : "; near it: " + near) +
                             "; \"ftcomm faults\" lists all");
    }
    const bool is_step = name == "step";
    fault->nth = is_step ? 0 : 1;
    const std::uint64_t least = fault->nth;
    if (colon != std::string_view::npos && !number(trim(value.substr(colon + 1)), least, std::uint64_t{1} << 62, &fault->nth))
        return bad(part, is_step ? "step:N takes the number of a training step, 0 or more"
                                 : "after the colon comes which pass of the point is meant, 1 or more");
    return {};
}

Status parse_deed(std::string_view part, std::string_view value, Fault* fault) {
    const auto colon = value.find(':');
    const auto name = trim(value.substr(0, colon));
    const bool given = colon != std::string_view::npos;
    const auto argument = given ? trim(value.substr(colon + 1)) : std::string_view{};
    if (name == "kill" || name == "corrupt") {
        if (given) return bad(part, std::string(name) + " takes no argument");
        fault->deed = name == "kill" ? Deed::Kill : Deed::Corrupt;
    } else if (name == "stop") {
        fault->deed = Deed::Stop;
        if (!number(argument, 0.0, kDay, &fault->seconds) || fault->seconds == 0)
            return bad(part, "stop needs the seconds after which the process goes on, more than 0 and at most a day: stop:3");
    } else if (name == "delay") {
        fault->deed = Deed::Delay;
        if (!number(argument, 0.0, kDay * 1000, &fault->seconds))
            return bad(part, "delay needs milliseconds, at most a day: delay:250");
        fault->seconds /= 1000;
    } else if (name == "exit") {
        fault->deed = Deed::Exit;
        if (!number(argument, 0, 255, &fault->argument)) return bad(part, "exit needs a code from 0 to 255: exit:1");
    } else if (name == "cut") {
        fault->deed = Deed::Cut;
        if (!number(argument, 0, kMaxRanks - 1, &fault->argument))
            return bad(part, "cut needs the rank at the other end of the link: cut:1");
    } else {
        return bad(part, "no action is called " + quoted(name) + "; there are " + kDeeds);
    }
    return {};
}

Status parse_entry(std::string_view entry, Fault* fault) {
    std::map<std::string_view, std::string_view> seen;
    for (const auto part : split(entry, ',')) {
        const auto equals = part.find('=');
        if (equals == std::string_view::npos) return bad(entry, quoted(part) + " is not of the form key=value");
        const auto key = trim(part.substr(0, equals));
        const auto value = trim(part.substr(equals + 1));
        if (!seen.emplace(key, value).second) return bad(entry, quoted(key) + " is given twice");
        Status status;
        if (key == "rank") {
            status = parse_rank(part, value, fault);
        } else if (key == "at") {
            status = parse_point(part, value, fault);
        } else if (key == "do") {
            status = parse_deed(part, value, fault);
        } else if (key == "step") {
            fault->has_step = true;
            if (!number(value, std::uint64_t{0}, std::uint64_t{1} << 62, &fault->step))
                status = bad(part, "step takes the number of a training step, 0 or more");
        } else {
            status = bad(entry, "there is no key " + quoted(key) + "; there are rank, at, step, do");
        }
        if (!status) return status;
    }
    for (const char* key : {"rank", "at", "do"})
        if (!seen.contains(key)) return bad(entry, std::string(key) + "= is missing; an entry is rank=R,at=POINT:NTH,do=ACTION");
    if (fault->has_step && fault->point == find_point("step"))
        return bad(entry, "step= says from which step on a point counts; for the beginning of step N write at=step:N alone");
    if (fault->deed == Deed::Cut && fault->argument == fault->rank)
        return bad(entry, "cut names the rank itself; it takes the rank at the other end of the link");
    return {};
}

}  // namespace

std::vector<std::string> near_points(const std::string& name) {
    std::size_t count = 0;
    const PointInfo* points = all_points(&count);
    std::vector<std::pair<std::size_t, std::string>> found;
    const std::string_view head = std::string_view(name).substr(0, name.find('.'));
    for (std::size_t i = 0; i < count; ++i) {
        const std::string_view candidate = points[i].name;
        const std::size_t distance = edit_distance(name, candidate);
        const bool same_group = !head.empty() && candidate.substr(0, candidate.find('.')) == head;
        if (same_group || distance <= std::max<std::size_t>(2, name.size() / 3)) found.emplace_back(distance, candidate);
    }
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::string> out;
    for (const auto& [distance, candidate] : found)
        if (out.size() < 4) out.push_back(candidate);
    return out;
}

Status parse_faults(const std::string& spec, std::vector<Fault>* out) {
    std::vector<Fault> faults;
    for (const auto entry : split(spec, ';')) {
        if (entry.empty()) continue;  // a trailing or doubled semicolon
        if (auto status = parse_entry(entry, &faults.emplace_back()); !status) return status;
    }
    *out = std::move(faults);
    return {};
}

}  // namespace ftcomm::fault
