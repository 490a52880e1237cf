// Reading another process's memory (process_vm_readv): one copy instead of two, and no page of shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/shm/layout.h"
#include "transport/transport.h"

namespace ftcomm::shm {

// Equal and not 0 for processes that may read each other. The kernel asks for one user, for a process that may be dumped, and for
// Yama's consent, which is given here to all processes of that user (PR_SET_PTRACER) where Yama asks for it. 0: not possible.
std::uint32_t memory_domain(std::uint64_t pid_namespace);

// `word`: the peer's, at remote.ticket_at.
Transport::Read read_peer(const Instance& peer, const Transport::Remote& remote, const std::uint64_t& word, std::byte* to,
                          std::size_t bytes);

}  // namespace ftcomm::shm
