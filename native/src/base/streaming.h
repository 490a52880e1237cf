// Writing past the caches into memory that ranks share, and write again and again: links.
//
// On AMD's processors (measured on Zen 3) a store to a line that another core has in its cache waits until that core has dropped its copy, one
// line after the other: 2.4 to 10 GB/s, by where the two cores are, while what was written is read at 22 to 47. Past the caches it is written at
// 40 to 50 and read at 13 to 23, wherever they are. What is short stays in the caches. So does the rest while the two share their last cache and
// the reader's own one has let go of the line, as it has of a long ring's (transport/shm/layout.h): then it is written at 30 GB/s and more.
#pragma once

#include <cstdint>

namespace ftcomm {

inline constexpr std::uint64_t kNeverStreams = ~std::uint64_t{0};

// Elsewhere a copy past the caches is an ordinary one (base/copy.h).
#if defined(__x86_64__)
inline constexpr bool kCanStream = true;
#else
inline constexpr bool kCanStream = false;
#endif

// From so many bytes on, on this machine, where each rank has a processor of its own.
std::uint64_t default_stream_limit();

// And where they share them: then the reader often finds what is short in the caches of the processor that wrote it, and 16 KiB take 1.4
// times as long as without; but twice to three times as long without where the two processors are far apart.
inline constexpr std::uint64_t kCrowdedStreamLimit = 16u << 10;

}  // namespace ftcomm
