#include "base/json.h"

#include <charconv>
#include <cmath>

namespace ftcomm {

namespace {

// Length of the valid UTF-8 sequence at the start of s, 0 if there is none (no overlong forms, no surrogates).
std::size_t utf8_length(std::string_view s) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(s[i]); };
    const unsigned char lead = byte(0);
    std::size_t n = 0;
    unsigned char low = 0x80, high = 0xbf;  // bounds of the second byte
    if (lead < 0x80) return 1;
    if (lead >= 0xc2 && lead <= 0xdf) n = 2;
    else if (lead >= 0xe0 && lead <= 0xef) n = 3;
    else if (lead >= 0xf0 && lead <= 0xf4) n = 4;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
    if (n == 0 || s.size() < n || byte(1) < low || byte(1) > high) return 0;
    for (std::size_t i = 2; i < n; ++i)
        if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
    return n;
}

}  // namespace

std::string json_quote(std::string_view s) {
    std::string out = "\"";
    while (!s.empty()) {
        const std::size_t n = utf8_length(s);
        const char c = s[0];
        if (n == 0) {
            out += "\\ufffd";
        } else if (n > 1) {
            out += s.substr(0, n);
        } else if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (c == '\n') {
            out += "\\n";
        } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
            constexpr char digits[] = "0123456789abcdef";
            out += "\\u00";
            out += digits[c >> 4];
            out += digits[c & 15];
        } else {
            out += c;
        }
        s.remove_prefix(n == 0 ? 1 : n);
    }
    return out + '"';
}

std::string json_number(double value) {
    if (!std::isfinite(value)) return "null";
    char text[32];
    const auto end = std::to_chars(text, text + sizeof text, value).ptr;
    return std::string(text, end);
}

}  // namespace ftcomm
