// Writing JSON, no more: error details, events and info for Python.
//   JsonObject().add("name", "x").add("ranks", std::vector<int>{1, 2}).raw("inner", JsonObject().text()).text()
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace ftcomm {

// With the quotes. What is not UTF-8 (names from outside) becomes U+FFFD: the output is always valid JSON.
std::string json_quote(std::string_view s);
std::string json_number(double value);  // shortest that reads back the same; null for infinities and NaN

template <class T>
std::string json_value(const T& value) {
    if constexpr (std::is_same_v<T, bool>) return value ? "true" : "false";
    else if constexpr (std::is_enum_v<T>) return std::to_string(static_cast<std::underlying_type_t<T>>(value));
    else if constexpr (std::integral<T>) return std::to_string(value);
    else if constexpr (std::floating_point<T>) return json_number(static_cast<double>(value));
    else return json_quote(std::string_view(value));
}

class JsonArray {
public:
    template <class T>
    JsonArray& add(const T& value) {
        return raw(json_value(value));
    }
    JsonArray& raw(std::string_view json) {
        text_ += text_.size() > 1 ? "," : "";
        text_ += json;
        return *this;
    }
    std::string text() const { return text_ + "]"; }

private:
    std::string text_ = "[";
};

template <class T>
std::string json_value(const std::vector<T>& values) {
    JsonArray array;
    for (const auto& value : values) array.add(static_cast<const T&>(value));
    return array.text();
}

class JsonObject {
public:
    template <class T>
    JsonObject& add(std::string_view key, const T& value) {
        return raw(key, json_value(value));
    }
    JsonObject& raw(std::string_view key, std::string_view json) {
        text_ += text_.size() > 1 ? "," : "";
        text_ += json_quote(key);
        text_ += ':';
        text_ += json;
        return *this;
    }
    std::string text() const { return text_ + "}"; }

private:
    std::string text_ = "{";
};

}  // namespace ftcomm
