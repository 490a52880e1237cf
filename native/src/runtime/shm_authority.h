// The authority of a job on one host: cells in the host's segment, alive as long as any rank maps it.
#pragma once

#include <deque>

#include "membership/authority.h"
#include "transport/shm/cells.h"

namespace ftcomm {

// Operations take effect at once; replies wait until the engine is out of the node.
class ShmAuthority final : public Authority {
public:
    explicit ShmAuthority(shm::Segment& segment) : segment_(segment), cells_(segment) {}

    void read(const std::string& key, std::uint64_t request) override;
    void compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) override;
    bool next(CellReply* reply);

private:
    void queue(std::uint64_t request, shm::Cells::Result result, Bytes value);

    shm::Segment& segment_;
    shm::Cells cells_;
    std::deque<CellReply> replies_;
};

}  // namespace ftcomm
