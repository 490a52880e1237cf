#include "transport/tcp/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace ftcomm {
namespace {

// What the library opens besides, and what there should be for strangers, joins, both sides that dial at once, and the program.
constexpr rlim_t kLeast = 16, kBeside = 64;

rlim_t open_now() {
    DIR* folder = ::opendir("/proc/self/fd");
    if (folder == nullptr) return 0;
    rlim_t found = 0;
    while (const auto* entry = ::readdir(folder)) found += entry->d_name[0] != '.';
    ::closedir(folder);
    return found - 1;  // the folder's own
}

}  // namespace

Status make_room_for(std::size_t connections) {
    rlimit limit{};
    if (connections == 0 || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
    const auto links = open_now() + connections;
    const auto wanted = links + connections + kBeside;
    if (limit.rlim_cur >= wanted) return {};  // RLIM_INFINITY is the largest number
    rlimit more{std::min(limit.rlim_max, wanted), limit.rlim_max};
    if (::setrlimit(RLIMIT_NOFILE, &more) == 0) limit = more;
    if (limit.rlim_cur >= links + kLeast) return {};
    return Status::error(Code::System,
                         "this process may have " + std::to_string(limit.rlim_cur) + " files open and has " +
                             std::to_string(links - connections) + ", and links to " + std::to_string(connections) +
                             " ranks take one each: raise the limit to " + std::to_string(links + kBeside) +
                             " at least (ulimit -Hn, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)");
}

}  // namespace ftcomm
