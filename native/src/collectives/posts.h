// What the ranks of one host put into a small operation, shown and not sent: each puts it into a place of its own, where the others come for it. It
// goes from cache to cache once, with what it belongs to in the same line, and nobody is sent a message who is not asleep.
//
// A rank has two places, used in turn by the number of the operation: nobody begins one before all have begun the one before, so who writes to
// a place knows that all have left the operation two before. What it shows stays when it ends, however it does, as a frame would that it has sent.
// Only the rank itself ever writes there (M9); a reader that was stopped meanwhile, and voted out, may find what belongs to something else, or
// half of it, and takes it for nothing: no stamp is used twice.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/shared_writer.h"
#include "collectives/board.h"
#include "transport/transport.h"

namespace ftcomm {

class Posts {
public:
    static constexpr std::size_t kMost = 16384;  // bytes of an input; of more the copies cost what the messages did
    static constexpr std::size_t kMostRanks = 8;  // each looks at all others

    struct Key {  // of an input
        std::uint64_t comm = 0, seq = 0, signature = 0;
        std::uint32_t attempt = 0;
    };
    struct Last {
        Key key;
        ByteView input;
    };

    // Its places are behind the line of the board, which knows those of the others.
    Posts(Board& board, SharedWriter& writer) : board_(board), writer_(writer) {}

    void put(const Key& key, ByteView input);
    // The newest that this rank has put in for this communicator, if it is there still.
    std::optional<Last> last(std::uint64_t comm) const;

    enum class Found : std::uint8_t { Nothing, Input, Other };  // Other: it has called something else
    // What a rank whose board is known shows of an operation: copied to `room`, which grows.
    Found look(int rank, const Key& key, Bytes& room, ByteView* input);
    // Where something is to come, and what look() has found there last.
    Transport::Word word(int rank, std::uint64_t seq) const;

private:
    Board& board_;
    SharedWriter& writer_;
    std::vector<std::uint64_t> seen_;  // stamps, by rank
};

}  // namespace ftcomm
