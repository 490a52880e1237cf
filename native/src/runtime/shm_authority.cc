#include "runtime/shm_authority.h"

#include <utility>

namespace ftcomm {

void ShmAuthority::read(const std::string& key, std::uint64_t request) {
    Bytes value;
    auto result = cells_.read(key, &value);
    queue(request, result, std::move(value));
}

void ShmAuthority::compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, std::uint64_t request) {
    Bytes value;
    auto result = cells_.compare_and_set(key, expected, desired, &value);
    queue(request, result, std::move(value));
}

bool ShmAuthority::next(CellReply* reply) {
    if (replies_.empty()) return false;
    *reply = std::move(replies_.front());
    replies_.pop_front();
    return true;
}

void ShmAuthority::queue(std::uint64_t request, shm::Cells::Result result, Bytes value) {
    using From = shm::Cells::Result;
    auto to = result == From::Value      ? CellResult::Value
              : result == From::Swapped  ? CellResult::Swapped
              : result == From::Conflict ? CellResult::Conflict
                                         : CellResult::Lost;
    replies_.push_back({request, to, std::move(value), segment_.header().boot});
}

}  // namespace ftcomm
