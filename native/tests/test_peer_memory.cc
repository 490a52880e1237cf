#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/unit.h"
#include "transport/shm/liveness_word.h"
#include "transport/shm/peer_memory.h"

using namespace ftcomm;

// A rank that reads too late finds nothing where the buffer was: the ticket, not the failed copy, says whether that is a refusal.
FT_TEST(peer_memory_buffer_that_is_gone) {
    constexpr std::size_t kBytes = 4096;
    auto* page = static_cast<std::byte*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT(page != MAP_FAILED);
    page[7] = std::byte{9};
    shm::Instance self{};
    self.liveness = static_cast<std::uint32_t>(::syscall(SYS_gettid)) | FUTEX_WAITERS;
    std::uint64_t ticket = 5;
    std::byte to[kBytes];
    const Transport::Remote remote{reinterpret_cast<std::uintptr_t>(page), 0, 5};
    const auto read = [&] { return shm::read_peer(self, remote, ticket, to, kBytes); };
    EXPECT(read() == Transport::Read::Done);
    EXPECT(to[7] == std::byte{9});
    ::munmap(page, kBytes);
    EXPECT(read() == Transport::Read::Refused);
    ticket = 6;
    EXPECT(read() == Transport::Read::Over);
}
