#include "channel/sender.h"

#include <algorithm>

#include "base/check.h"
#include "base/copy.h"
#include "base/fault_tolerance.h"

namespace ftcomm {
namespace {

constexpr std::size_t kSpares = 16, kWorthKeeping = 16u << 10;

}  // namespace

std::byte* Sender::reserve(int slot, std::uint32_t length) {
    if (!clear(slot)) return nullptr;  // frames of one link keep their order
    return transport_.reserve(slot, length);
}

SharedWriter& Sender::writer(int slot) {
    const auto at = static_cast<std::size_t>(slot);
    if (at >= writers_.size()) writers_.resize(at + 1);
    return writers_[at];
}

void Sender::fill(int slot, std::byte* room, const void* from, std::size_t bytes) {
    if (!streams(slot, bytes)) copy_bytes(room, from, bytes);
    else if (!paced_) copy_past_cache(room, from, bytes);
    else writer(slot).copy(room, from, bytes);
}

bool Sender::is_quick(int slot) {
    if (!transport_.is_near(slot)) return false;
    if (!paced_) return quick_ > 0 && ++asked_ % quick_ == 0;
    auto& writer = this->writer(slot);
    if (writer.way() == Into::Caches) return true;
    writer.went_past();
    return false;
}

bool Sender::send_from(int slot, FrameHeader header, const Held& payload) {
    FT_CHECK(payload.by != nullptr, "who lends has to take it back: send_stable");
    header.length = static_cast<std::uint32_t>(payload.bytes.size());
    return clear(slot) && transport_.send_from(slot, header, payload);
}

void Sender::queue(int slot, const FrameHeader& header, Bytes payload) {
    Queued q;
    q.header = header;
    q.header.length = static_cast<std::uint32_t>(payload.size());
    q.owned = std::move(payload);
    queues_[slot].push_back(std::move(q));
}

Bytes Sender::scratch(std::uint32_t length) {
    if (spare_.empty()) return Bytes(length);
    auto memory = std::move(spare_.back());
    spare_.pop_back();
    memory.resize(length);
    return memory;
}

void Sender::recycle(Bytes&& memory) {
    if (memory.size() >= kWorthKeeping && spare_.size() < kSpares) spare_.push_back(std::move(memory));
}

// Into the transport, if there is room.
bool Sender::hand_over(int slot, const FrameHeader& header, ByteView payload, bool stable) {
    // Without fault tolerance there is no fence, and who is done does not know that what it has lent has come.
    if (stable && kFaultTolerant && transport_.sends_from(slot, payload.size())) {
        if (!transport_.send_from(slot, header, {payload, nullptr})) return false;
        const Loan loan{slot, header.comm};
        if (std::ranges::find(lent_, loan) == lent_.end()) lent_.push_back(loan);
        return true;
    }
    auto* room = transport_.reserve(slot, header.length);
    if (room == nullptr) return false;
    fill(slot, room, payload.data(), payload.size());
    transport_.commit(slot, header);
    return true;
}

void Sender::send(int slot, FrameHeader header, ByteView payload) {
    FT_CHECK(payload.size() <= max_payload(), "frame of %zu bytes, at most %u", payload.size(), max_payload());
    header.length = static_cast<std::uint32_t>(payload.size());
    if (clear(slot) && hand_over(slot, header, payload, false)) return;
    queue(slot, header, Bytes(payload.begin(), payload.end()));
}

void Sender::send_stable(int slot, FrameHeader header, ByteView payload) {
    header.length = static_cast<std::uint32_t>(payload.size());
    if (clear(slot) && hand_over(slot, header, payload, true)) return;
    Queued q;
    q.header = header;
    q.stable = payload;
    q.is_stable = true;
    queues_[slot].push_back(std::move(q));
}

void Sender::send_long(int slot, FrameHeader header, ByteView payload) {
    while (payload.size() > max_payload()) {
        header.flags |= 1;
        send(slot, header, payload.first(max_payload()));
        payload = payload.subspan(max_payload());
    }
    header.flags &= static_cast<std::uint8_t>(~1u);
    send(slot, header, payload);
}

void Sender::on_writable(int slot) {
    const auto it = queues_.find(slot);
    if (it == queues_.end()) return;
    auto& q = it->second;
    while (!q.empty()) {
        auto& f = q.front();
        if (!hand_over(slot, f.header, f.is_stable ? f.stable : ByteView(f.owned), f.is_stable)) return;
        recycle(std::move(f.owned));
        q.pop_front();
    }
    queues_.erase(it);
}

void Sender::drop_collectives(std::uint64_t comm) {
    for (auto& [slot, q] : queues_)
        std::erase_if(q, [&](const Queued& f) { return f.header.comm == comm && is_collective(f.header.kind); });
    std::erase_if(queues_, [](const auto& entry) { return entry.second.empty(); });
}

bool Sender::has_lent(std::uint64_t comm) const { return std::ranges::find(lent_, comm, &Loan::comm) != lent_.end(); }

void Sender::take_back(std::uint64_t comm, bool has_come) {
    for (auto& [slot, q] : queues_) {
        for (auto& f : q) {
            if (!f.is_stable || f.header.comm != comm) continue;
            FT_CHECK(!has_come, "what has come was not even sent");
            f.owned.assign(f.stable.begin(), f.stable.end());
            f.is_stable = false;
        }
    }
    std::erase_if(lent_, [&](const Loan& loan) {
        if (loan.comm != comm) return false;
        transport_.take_back(loan.slot, comm, has_come);
        return true;
    });
}

}  // namespace ftcomm
