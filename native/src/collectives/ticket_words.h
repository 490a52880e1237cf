// Where this rank's tickets lie: in windows, as words that the ranks near it can look at. (Beside the buffers, a look would be a second range for
// the kernel to copy, and a read of two ranges takes 2 to 4 % longer than one of the first alone, and 0.4 us longer if it is small.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "collectives/ticket.h"
#include "transport/transport.h"

namespace ftcomm {

// Of one incarnation, as long as it is there: a peer may still look at the word of what is over, and finds another ticket there, or none. (Where
// it was killed, its last ones; Transport::Remote::is_of.)
class TicketWords {
public:
    explicit TicketWords(Transport& memory) : memory_(memory) {}
    struct Word {
        std::uint64_t* at = nullptr;  // null: there was no room
        std::uint64_t place = 0;  // Transport::Remote::ticket_at
    };
    Word take();
    void give_back(const Word& word) { spare_.push_back(word); }

private:
    Transport& memory_;
    std::vector<Word> spare_;
    std::size_t made_ = 0;
};

// Leave to read this process's memory, from issue() until this object goes.
class ReadTicket {
public:
    ReadTicket(TicketWords& words, std::uint64_t number) : words_(words), number_(number) {}
    ~ReadTicket() {
        if (!ticket_) return;
        ticket_.reset();
        words_.give_back(word_);
    }
    ReadTicket(const ReadTicket&) = delete;
    ReadTicket& operator=(const ReadTicket&) = delete;

    // False: there is no room for its word. Who is told of it all the same is refused (Transport::Read).
    bool issue() {
        if (ticket_) return true;
        word_ = words_.take();
        if (word_.at == nullptr) return false;
        ticket_.emplace(word_.at, number_);
        return true;
    }
    std::uint64_t place() const { return word_.place; }
    std::uint64_t number() const { return number_; }

private:
    TicketWords& words_;
    const std::uint64_t number_;
    TicketWords::Word word_;
    std::optional<Ticket> ticket_;
};

}  // namespace ftcomm
