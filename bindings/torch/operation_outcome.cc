// Who contributed to a finished operation.
#include "operation.h"

namespace ftcomm_torch {

std::vector<std::uint8_t> Operation::contributors() {
    std::vector<std::uint8_t> all(static_cast<std::size_t>(size_), 1);
    for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (calls[i].kind != Call::Kind::Collective) continue;
        std::vector<std::uint8_t> flags(all.size(), 0);
        if (ft_request_ranks(requests_[i], flags.data(), flags.size()) != FT_OK) continue;
        for (std::size_t r = 0; r < all.size(); ++r) all[r] = static_cast<std::uint8_t>(all[r] & (flags[r] != 0 ? 1 : 0));
    }
    return all;
}

std::vector<Operation::Piece> Operation::pieces() {
    std::vector<Piece> pieces;
    std::uint64_t base = 0;  // several requests (a coalesced call): their elements one after the other
    for (std::size_t i = 0; i < requests_.size(); ++i) {
        ft_result result{};
        if (ft_request_result(requests_[i], &result) != FT_OK) continue;
        for (std::int32_t chunk = 0; chunk < result.chunks; ++chunk) {
            Piece piece{0, 0, std::vector<std::uint8_t>(static_cast<std::size_t>(size_), 0)};
            if (ft_request_chunk(requests_[i], chunk, &piece.offset, &piece.count, piece.flags.data(), piece.flags.size()) ==
                FT_OK) {
                piece.offset += base;
                pieces.push_back(std::move(piece));
            }
        }
        base += calls[i].op.count;
    }
    return pieces;
}

std::uint64_t Operation::epoch() {
    ft_result result{};
    if (requests_.empty() || ft_request_result(requests_.back(), &result) != FT_OK) return 0;
    return result.epoch;
}

int Operation::source() {
    ft_result result{};
    if (requests_.size() != 1 || ft_request_result(requests_[0], &result) != FT_OK) return -1;
    return result.source;
}

std::uint64_t Operation::received() {
    ft_result result{};
    if (requests_.size() != 1 || ft_request_result(requests_[0], &result) != FT_OK) return 0;
    return result.bytes;
}

}  // namespace ftcomm_torch
