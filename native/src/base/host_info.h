// What this CPU and kernel offer, tried out rather than read from version numbers (containers filter system calls).
#pragma once

#include <string>
#include <vector>

namespace ftcomm {

struct HostInfo {
    std::string kernel;                     // "Linux 6.1.0"
    std::string machine;                    // "x86_64"
    std::vector<std::string> cpu_features;  // those that matter here and work on this CPU
    std::string reduce_kernels;             // the reduction kernels in use
    bool pidfd_open = false;
    bool futex_waitv = false;
    bool process_vm_readv = false;          // of this process itself; of others see ptrace_scope
    bool memfd_create = false;
    int ptrace_scope = -1;                  // Yama's setting, -1: no Yama. 1: only descendants, or with PR_SET_PTRACER
};

HostInfo probe_host();
std::string to_json(const HostInfo& info);

}  // namespace ftcomm
