#include "base/streaming.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <array>
#include <cstring>
#include <string_view>
#endif

namespace ftcomm {

std::uint64_t default_stream_limit() {
#if defined(__x86_64__)
    unsigned most = 0;
    std::array<unsigned, 3> name{};  // ebx, edx, ecx
    if (__get_cpuid(0, &most, &name[0], &name[2], &name[1]) == 0) return kNeverStreams;
    std::array<char, sizeof name> text{};
    std::memcpy(text.data(), name.data(), sizeof name);
    const std::string_view vendor(text.data(), text.size());
    if (vendor == "AuthenticAMD" || vendor == "HygonGenuine") return 4u << 10;
#endif
    return kNeverStreams;
}

}  // namespace ftcomm
