// What a communicator's collectives gave, in the log: a record for each operation, in order. A process that runs again gets its results there.
//
// Ranks of one host log only a share each of a result that all ranks have (L7): the segments that they owned, or put in, and their part of
// those of other hosts. Together the shares are the result, once per host instead of once per rank. Whoever has returned from an operation
// that ends in a fence knows that every share is in its owner's log; one without a fence is in the logs when all have returned
// (kept_result.cc). A record says of itself whether it is a share, and among whom, or the whole, so ranks need not agree on it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "channel/phased_log.h"
#include "collectives/op_state.h"
#include "collectives/results.h"
#include "communicator/node.h"

namespace ftcomm {

class ResultStream {
public:
    // The tag of a record: what the operation runs as; with kShare, and above it a digest of the ranks that share, if it is only a part; or kFailed.
    // (In answers about a lost log: kUndone, of which not all have logged their share, and nobody keeps the result.)
    static constexpr std::int64_t kFailed = -1, kUndone = -2, kShare = 256;
    static constexpr std::size_t kHead = 64;  // in front of the data: which operation it is of

    ResultStream(PhasedLog& log, const CommSpec& spec, int rank)
        : log_(log), spec_(spec), rank_(rank), last_(log.last(key(rank))) {}

    std::uint64_t last() const { return last_; }
    // There will be room for its record: asked before anybody can complete it with what this rank sends.
    Status make_room(const OpState& op);
    // Whether the result is in the log: here, or in shares that all ranks of this host have logged. Of an operation with a fence that is
    // so for as long as it is known to be complete; one without may be complete at some ranks only.
    bool is_whole(std::uint64_t seq);
    // Who is on this host: before the first operation, and when somebody is back.
    void look_at_hosts();

    // The operation's data is here. Done again, by this process or a later one, it must be what the log has: else ReplayDiverged.
    Status add(const OpState& op);
    // The same piece by piece, for a share whose parts the other ranks read in this rank's log as they come: false if this operation's
    // is not logged so. All ranks have to be on this host, and nothing may be on record yet. add() commits it; it never was, if it
    // is not added, or is begun again.
    bool begin_share(const OpState& op);
    bool put_in_share(ByteView piece);
    // Bytes [at, at + bytes) of the share of another rank; Code::Invalid: it is not there (any more).
    Status view_share(const OpState& op, int rank, std::uint64_t at, std::uint64_t bytes, Log::View* out);
    // An operation that all ranks saw fail is part of the history as well.
    Status add_failure(const OpState& op, const Cause& cause);

    struct Entry {
        Shape shape;
        bool failed = false;
    };
    std::optional<Entry> entry(std::uint64_t seq);
    // Fills the operation's buffers; or the failure that is on record; or ReplayDiverged: it was another operation.
    Status read(OpState& op);

private:
    LogKey key(int rank) const { return {spec_.id, spec_.members[static_cast<std::size_t>(rank)], kResults}; }
    int size() const { return static_cast<int>(spec_.members.size()); }
    bool shares(const OpState& op) const;
    bool shared_here(const LogRecord& record) const;
    const std::array<std::byte, kHead>& head_of(const OpState& op);
    Elements share_of(const OpState& op);  // this rank's, of a flat one
    std::vector<std::span<std::byte>> pieces(const OpState& op, int rank, bool share) const;  // that the rank's record has
    void abandon_share();
    Status compare(const OpState& op, ByteView head);
    Status read_shares(OpState& op);

    PhasedLog& log_;
    const CommSpec& spec_;
    const int rank_;
    std::uint64_t last_;
    std::vector<int> fellows_;  // whose logs are on this host, this rank included; ascending
    std::int64_t share_tag_ = 0;  // in the tag of a share: among whom it is
    // The last head, and of which shape but for its number; and the last share: the next operation is often the same.
    std::array<std::byte, kHead> head_{};
    std::optional<Shape> headed_;
    std::uint64_t number_at_ = 0;
    std::uint64_t shared_count_ = 0;
    Elements share_;
    std::uint64_t begun_ = 0;  // the operation whose share is being written; 0: none
    std::uint64_t bytes_ = 0, put_ = 0;  // of its record, and so many of them are there
    std::int64_t tag_ = 0;
    std::uint64_t aux_ = 0;
};

}  // namespace ftcomm
