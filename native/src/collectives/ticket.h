// A rank's leave to be read: the word that says whose its buffers are, and what a reader makes of it (C9).
#pragma once

#include <atomic>
#include <cstdint>

#include "membership/rules.h"
#include "transport/transport.h"

namespace ftcomm {

// Stands until this object goes: then the buffers are the caller's again, and whoever reads them later must see that.
class Ticket {
public:
    Ticket(std::uint64_t* word, std::uint64_t number) : word_(word), number_(number) {
        std::atomic_ref<std::uint64_t>(*word_).store(number_, std::memory_order_release);
    }
    ~Ticket() {
        std::atomic_ref<std::uint64_t> word(*word_);
#if defined(__SANITIZE_THREAD__)  // does not know fences
        if (word.load(std::memory_order_relaxed) == number_) word.exchange(0, std::memory_order_seq_cst);
#else
        if (word.load(std::memory_order_relaxed) == number_) word.store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
#endif
    }
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;

private:
    std::uint64_t* word_;
    std::uint64_t number_;
};

// C9: a read counts only if the ticket still stands after it. Over: the peer has taken its buffers back, or is dying.
inline Transport::Read read_shown(Transport& transport, const Rules& rules, int slot, const Transport::Remote& remote,
                                  std::byte* to, std::size_t bytes) {
    const auto result = transport.read(slot, remote, to, bytes);
    return result == Transport::Read::Over && !rules.c9 ? Transport::Read::Done : result;
}

}  // namespace ftcomm
