// Who this process is: host, namespaces, user. Nothing here is secret or stable across boots.
#pragma once

#include <cstdint>
#include <string>

#include "base/rank_set.h"

namespace ftcomm {

struct HostIdentity {
    std::uint64_t host = 0;           // ranks with the same one live and die with the same machine (M12)
    std::uint64_t machine = 0;        // the same after another boot, by its name
    std::uint64_t domain = 0;         // ranks with the same one can hand each other descriptors
    std::uint64_t pid_namespace = 0;
    std::uint64_t processes = 0;      // the pid namespace among those of all hosts
    std::uint32_t user = 0;
    std::int32_t pid = 0;
    std::uint64_t kernel = 0;  // ranks with the same one may share processors (machines cloned while they ran have it, too)
    RankSet processors;  // numbers of those that this process may run on
};

// `host` and `machine`, of a host of this name (gethostname); `name`: as below.
HostIdentity identify_host(const std::string& boot, const std::string& node, const std::string& name);
// Whose a log is: a folder is named by it.
std::uint64_t log_owner(const HostIdentity& id, bool survives_boot);
// `name`: the user's own host identity, empty: found.
HostIdentity find_host(const std::string& name);
std::uint64_t random64();

}  // namespace ftcomm
