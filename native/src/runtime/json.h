// Just enough JSON to write: one object or array after another, in order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace ftcomm {

class Json {
public:
    Json& begin() { return open('{'); }
    Json& end() { return close('}'); }
    Json& begin_list() { return open('['); }
    Json& end_list() { return close(']'); }
    Json& key(std::string_view k) {
        comma();
        quote(k);
        out_ += ':';
        fresh_ = true;
        return *this;
    }
    Json& text(std::string_view v) {
        comma();
        quote(v);
        return *this;
    }
    template <class T>
    Json& number(T v) {
        comma();
        out_ += std::to_string(v);
        return *this;
    }
    Json& seconds(std::int64_t ns) {
        char buffer[40];
        std::snprintf(buffer, sizeof buffer, "%lld.%09lld", static_cast<long long>(ns / 1'000'000'000),
                      static_cast<long long>(ns % 1'000'000'000));
        return raw(buffer);
    }
    Json& boolean(bool v) { return raw(v ? "true" : "false"); }
    Json& raw(std::string_view v) {
        comma();
        out_ += v;
        return *this;
    }
    Json& numbers(const std::vector<int>& list) {
        begin_list();
        for (int v : list) number(v);
        return end_list();
    }
    const std::string& str() const { return out_; }

private:
    Json& open(char c) {
        comma();
        out_ += c;
        fresh_ = true;
        return *this;
    }
    Json& close(char c) {
        out_ += c;
        fresh_ = false;
        return *this;
    }
    void comma() {
        if (!fresh_) out_ += ',';
        fresh_ = false;
    }
    // Bytes that are no printable ASCII are escaped one by one: the result is JSON whatever comes in.
    void quote(std::string_view v) {
        out_ += '"';
        for (char c : v) {
            auto u = static_cast<unsigned char>(c);
            if (c == '"' || c == '\\') {
                out_ += '\\';
                out_ += c;
            } else if (u < 0x20 || u >= 0x7f) {
                char buffer[8];
                std::snprintf(buffer, sizeof buffer, "\\u%04x", u);
                out_ += buffer;
            } else {
                out_ += c;
            }
        }
        out_ += '"';
    }
    std::string out_;
    bool fresh_ = true;
};

}  // namespace ftcomm
