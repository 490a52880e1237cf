// What a rank does about logs that were lost, its own or another's: since when each rank's log counts, and what it has of those that are gone.
// How a rank has its own log again is in restore.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/restore_records.h"

namespace ftcomm {

class Communicator::LostLogs {
public:
    explicit LostLogs(Communicator& comm);

    Status read();  // what the processes before this one have noted
    bool is_own_lost() const;
    // By rank, since which incarnation its log counts; 0: it was never lost.
    const std::vector<std::uint32_t>& since() const { return since_; }
    bool any() const;
    void note(std::size_t rank, std::uint32_t incarnation);
    void learn(const std::vector<std::uint32_t>& decided);
    // One of those who vote has a log that counts for nothing any more, and is told; or this rank has.
    bool has_older(const std::map<int, Vote>& votes);
    void on_older();

    // restore_serve.cc: the others' questions
    LogKey key_of(LostStream stream, int part, int lost, int other) const;
    void on_ask(int rank, ByteView body);

private:
    void put_state(int rank, ByteWriter& w);
    std::shared_ptr<const Bytes> whole_result(std::uint64_t seq, const LogRecord& share);
    void put_records(int rank, const RestoreAsk& asked, ByteWriter& w);

    Communicator& comm_;
    Core& core_;
    const CommSpec& spec_;
    const int rank_;
    std::vector<std::uint32_t> since_;
    std::shared_ptr<const Bytes> whole_;  // the last one that was put together
    std::uint64_t whole_seq_ = 0;
};

}  // namespace ftcomm
