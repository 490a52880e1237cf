#include "errors.h"

#include <atomic>
#include <cstdint>
#include <utility>

#include "ftcomm/ftcomm.h"

namespace ftcomm_torch {
namespace {

PyObject* g_error_class = nullptr;

struct Detail {
    bool set = false;
    int code = 0;
    std::string json{};
};
thread_local Detail t_detail;

void append_utf8(std::string& out, unsigned value) {
    if (value < 0x80) {
        out += static_cast<char>(value);
    } else if (value < 0x800) {
        out += static_cast<char>(0xC0 | (value >> 6));
        out += static_cast<char>(0x80 | (value & 0x3F));
    } else {
        out += static_cast<char>(0xE0 | (value >> 12));
        out += static_cast<char>(0x80 | ((value >> 6) & 0x3F));
        out += static_cast<char>(0x80 | (value & 0x3F));
    }
}

// The string member `key` of a flat JSON object that our own library wrote; "" when it is not there.
std::string json_string(const std::string& json, const std::string& key) {
    const std::string label = "\"" + key + "\":\"";
    std::size_t at = json.find(label);
    std::string out;
    if (at == std::string::npos) return out;
    for (at += label.size(); at < json.size() && json[at] != '"'; ++at) {
        if (json[at] != '\\' || at + 1 >= json.size()) {
            out += json[at];
            continue;
        }
        const char escaped = json[++at];
        if (escaped == 'n') {
            out += '\n';
        } else if (escaped == 't') {
            out += '\t';
        } else if (escaped == 'u' && at + 4 < json.size()) {
            append_utf8(out, static_cast<unsigned>(std::stoul(json.substr(at + 1, 4), nullptr, 16)));
            at += 4;
        } else {
            out += escaped;
        }
    }
    return out;
}

std::string quoted(const std::string& text) {
    static const char* kHex = "0123456789abcdef";
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            out += "\\u00";
            out += kHex[static_cast<unsigned char>(c) >> 4];
            out += kHex[static_cast<unsigned char>(c) & 15];
        } else {
            out += c;
        }
    }
    return out + "\"";
}

}  // namespace

FtError::FtError(int code_, std::string detail_, std::string message)
    : torch::PyTorchError(std::move(message)), code(code_), detail(std::move(detail_)) {}

PyObject* FtError::python_type() {
    t_detail = {true, code, detail};
    return g_error_class != nullptr ? g_error_class : PyExc_RuntimeError;
}

std::exception_ptr last_error(int code) {
    std::string json = ft_last_error();
    std::string message = json_string(json, "message");
    const std::string operation = json_string(json, "operation");
    if (!operation.empty() && message.find(operation) == std::string::npos) message = operation + ": " + message;
    if (message.empty()) message = "error " + std::to_string(code) + " without a message";
    // torch's own tests and many scripts recognize a timeout by these two words.
    const char* kind = code == FT_TIMEOUT ? "ftcomm: Timed out in " : "ftcomm: ";
    return std::make_exception_ptr(FtError(code, std::move(json), kind + message));
}

std::exception_ptr own_error(int code, const std::string& message, const std::string& ranks) {
    std::string json = "{\"code\":" + std::to_string(code) + ",\"message\":" + quoted(message) + ",\"ranks\":" + ranks + "}";
    return std::make_exception_ptr(FtError(code, std::move(json), "ftcomm: " + message));
}

int code_of(const std::exception_ptr& error) {
    if (!error) return FT_OK;
    try {
        std::rethrow_exception(error);
    } catch (const FtError& e) { return e.code; } catch (...) {
        return FT_INTERNAL;
    }
}

void set_error_class(PyObject* cls) {
    Py_XINCREF(cls);
    Py_XDECREF(std::exchange(g_error_class, cls));
}

bool take_detail(int* code, std::string* detail) {
    if (!std::exchange(t_detail.set, false)) return false;
    *code = t_detail.code;
    *detail = std::move(t_detail.json);
    return true;
}

void refuse(const std::string& message, int code) { std::rethrow_exception(own_error(code, message)); }

}  // namespace ftcomm_torch
