#pragma once

#include <string>

namespace ftcomm {

// The items' texts with `between` between them; `text` says what one's is.
template <typename Items, typename Text>
std::string joined(const Items& items, const char* between, const Text& text) {
    std::string out;
    for (const auto& item : items) {
        if (!out.empty()) out += between;
        out += text(item);
    }
    return out;
}

// Of texts, or numbers.
template <typename Items>
std::string joined(const Items& items, const char* between = ", ") {
    return joined(items, between, [](const auto& item) {
        if constexpr (requires { std::to_string(item); }) return std::to_string(item);
        else return std::string(item);
    });
}

}  // namespace ftcomm
