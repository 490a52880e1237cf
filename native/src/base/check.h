// Assertions that stay on in every build: a protocol that has lost an invariant must stop, not guess.
#pragma once

namespace ftcomm {

[[noreturn]] void check_failed(const char* file, int line, const char* expression, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

}  // namespace ftcomm

// FT_CHECK(condition, "printf-style detail", ...): the detail is mandatory and says which invariant broke.
#define FT_CHECK(condition, ...)                                                 \
    do {                                                                         \
        if (!(condition)) [[unlikely]]                                           \
            ::ftcomm::check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    } while (false)
