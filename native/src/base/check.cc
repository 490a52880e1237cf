#include "base/check.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace ftcomm {

void check_failed(const char* file, int line, const char* expression, const char* format, ...) {
    std::fprintf(stderr, "ftcomm: %s:%d: invariant broken: %s: ", file, line, expression);
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fputc('\n', stderr);
    std::fflush(stderr);
    std::abort();
}

}  // namespace ftcomm
