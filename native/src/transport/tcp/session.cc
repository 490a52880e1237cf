#include "transport/tcp/session.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/crc32c.h"

namespace ftcomm::tcp {
namespace {

constexpr std::size_t kHeader = sizeof(WireHeader);
constexpr std::size_t kSealedAtOnce = 256u << 10;  // more would be out of the cache again before it is written

// What lies outside is not the session's to change: its header says another checksum.
void flip(const SendRing::Frame& frame) {
    if (frame.outside.bytes.empty()) frame.data[frame.size > kHeader ? kHeader : kHeader - 1] ^= std::byte{0x40};
}

std::uint32_t header_crc(WireHeader header) {
    header.header_crc = 0;
    return crc32c(&header, sizeof header);
}

}  // namespace

// The receiver acknowledges after 1/16 of the ring: then a sender that is out of room always hears soon.
Session::Session(std::size_t ring_bytes) : ring_((ring_bytes + 15) & ~std::size_t{15}), ack_after_(ring_bytes / 16) {
    FT_CHECK(ring_bytes >= 4096, "ring of %zu bytes", ring_bytes);
}

std::uint32_t Session::max_payload() const {
    // A quarter: however the ring is split by what is still unacknowledged (less than 1/16), one of the parts has it.
    return static_cast<std::uint32_t>(std::min<std::size_t>(kMaxFramePayload, ring_.capacity() / 4 - kHeader));
}

void Session::seal(std::byte* at, WireHeader& header) const {
    header.header_crc = header_crc(header);
    std::memcpy(at, &header, kHeader);
}

std::byte* Session::reserve(std::uint32_t length) {
    FT_CHECK(length <= max_payload(), "frame of %u bytes, the limit is %u", length, max_payload());
    reserved_ = ring_.reserve(wire_size(length));
    if (reserved_ == nullptr) {
        refused_length_ = refused_ ? std::max(refused_length_, length) : length;
        refused_ = true;
        return nullptr;
    }
    reserved_length_ = length;
    return reserved_ + kHeader;
}

void Session::commit(const FrameHeader& frame) {
    FT_CHECK(reserved_ != nullptr && frame.length <= reserved_length_, "commit without its reserve");
    const std::size_t size = wire_size(frame.length);
    std::memset(reserved_ + kHeader + frame.length, 0, size - kHeader - frame.length);
    WireHeader header;
    header.seq = ring_.last() + 1;
    header.ack = received_;
    header.frame = frame;
    header.payload_crc = crc32c(reserved_ + kHeader, size - kHeader);  // with the padding: no byte is unprotected
    seal(reserved_, header);
    ring_.commit(size);
    reserved_ = nullptr;
    // Not yet written, but nothing overtakes it: the peer will know.
    if (connected_) {
        ack_sent_ = received_;
        unacknowledged_bytes_ = 0;
    }
}

// Its header is written when it goes out: if its checksum is not known it is summed then, while it is in the cache anyway.
bool Session::send_from(const FrameHeader& frame, const Held& payload) {
    FT_CHECK(frame.length == payload.bytes.size() && frame.length <= max_payload() && frame.length % 16 == 0,
             "frame of %u bytes from outside", frame.length);
    if (!ring_.has_room_outside(frame.length) || reserve(0) == nullptr) {
        refused_outside_ = std::max(refused_outside_, frame.length);
        refused_ = true;
        return false;
    }
    WireHeader header;
    header.seq = ring_.last() + 1;
    header.frame = frame;
    std::memcpy(reserved_, &header, kHeader);
    reserved_ = nullptr;
    ring_.commit(kHeader, payload);
    return true;
}

void Session::seal_outside(std::uint64_t number, SendRing::Frame& frame) {
    WireHeader header;
    std::memcpy(&header, frame.data, kHeader);
    header.header_crc = 0;
    header.ack = received_;
    header.payload_crc = frame.outside.sum ? *frame.outside.sum : crc32c(frame.outside.bytes.data(), frame.outside.bytes.size());
    if (number == corrupted_) header.payload_crc ^= 0x40u;
    seal(frame.data, header);
    frame.sealed = true;
    ack_sent_ = received_;
    unacknowledged_bytes_ = 0;
}

// What has come is as good as acknowledged: else, where the peer said how far it is before it came, it would be sent again. A part of it may be out
// again: the rest of that follows from a copy, as does all that has not come.
void Session::take_back(std::uint64_t comm, bool has_come) {
    const auto is_lent = [&](const SendRing::Frame& frame) {
        if (frame.outside.bytes.empty() || frame.outside.by != nullptr) return false;
        WireHeader header;
        std::memcpy(&header, frame.data, kHeader);
        return header.frame.comm == comm;
    };
    if (has_come) {
        for (auto number = ring_.first(); number <= ring_.last(); ++number)
            if (is_lent(ring_.at(number))) acked_ = std::max(acked_, number);
        FT_CHECK(acked_ <= highest_sent_, "frame %llu has come, which was not sent", static_cast<unsigned long long>(acked_));
        release();
    }
    for (auto number = ring_.first(); number <= ring_.last(); ++number) {
        auto& outside = ring_.at(number).outside;
        if (!is_lent(ring_.at(number))) continue;
        const auto copy = std::make_shared<Bytes>(outside.bytes.begin(), outside.bytes.end());
        outside.bytes = *copy;
        outside.by = copy;
    }
}

void Session::want_ack(bool at_once) {
    control_wanted_ = true;
    control_at_once_ = control_at_once_ || at_once;
}

void Session::corrupt_last() {
    if (ring_.empty() || corrupted_ != 0) return;
    corrupted_ = ring_.last();
    flip(ring_.at(corrupted_));
}

bool Session::connected(std::uint64_t peer_received) {
    if (peer_received > std::max(highest_sent_, acked_)) return false;
    connected_ = true;
    ++stats_.connections;
    acked_ = std::max(acked_, peer_received);
    cursor_offset_ = 0;
    // Lower positions than acked_ are old news: the peer got more over its previous connection after it had said so.
    cursor_ = acked_ + 1;
    control_active_ = false;
    control_offset_ = 0;
    release();
    return true;
}

void Session::disconnected() {
    if (!connected_) return;  // damage done before the first connection has to reach the peer, too
    connected_ = false;
    control_active_ = false;
    control_offset_ = 0;
    cursor_offset_ = 0;
    if (corrupted_ >= ring_.first() && corrupted_ <= ring_.last()) flip(ring_.at(corrupted_));
    corrupted_ = 0;
    for (auto number = ring_.first(); number <= ring_.last(); ++number) {
        auto& frame = ring_.at(number);
        frame.sealed = frame.outside.bytes.empty();
        frame.outside.sum.reset();  // it may have been that
    }
    release();
}

bool Session::wants_write() const { return connected_ && (control_active_ || control_wanted_ || cursor_ <= ring_.last()); }

int Session::gather(iovec* out, int max) {
    if (!connected_) return 0;
    int n = 0;
    // A request for an acknowledgement follows the frames that it is about.
    const bool due = control_wanted_ && (!control_at_once_ || cursor_ > ring_.last());
    if (!control_active_ && due && cursor_offset_ == 0) {
        WireHeader header;
        header.ack = received_;
        header.flags = control_at_once_ ? std::uint32_t{kAckNow} : 0;
        seal(control_, header);
        control_active_ = true;
        control_offset_ = 0;
        control_wanted_ = control_at_once_ = false;
        ack_sent_ = received_;
        unacknowledged_bytes_ = 0;
    }
    if (control_active_) out[n++] = {control_ + control_offset_, kHeader - control_offset_};
    const auto add = [&](const std::byte* data, std::size_t size) {
        if (n > 0 && static_cast<std::byte*>(out[n - 1].iov_base) + out[n - 1].iov_len == data) out[n - 1].iov_len += size;
        else if (n == max) return false;
        else out[n++] = {const_cast<std::byte*>(data), size};
        return true;
    };
    std::size_t skip = cursor_offset_;
    std::size_t sealed = 0;
    for (auto number = cursor_; number <= ring_.last(); ++number) {
        auto& frame = ring_.at(number);
        if (!frame.sealed) {
            if (sealed >= kSealedAtOnce || n == max) break;
            seal_outside(number, frame);
            sealed += frame.outside.bytes.size();
        }
        if (skip < frame.size && !add(frame.data + skip, frame.size - skip)) break;
        const auto outside = frame.outside.bytes.subspan(std::max(skip, frame.size) - frame.size);
        if (!outside.empty() && !add(outside.data(), outside.size())) break;
        skip = 0;
    }
    return n;
}

void Session::wrote(std::size_t bytes) {
    if (control_active_) {
        const auto part = std::min(bytes, kHeader - control_offset_);
        control_offset_ += part;
        bytes -= part;
        if (control_offset_ == kHeader) control_active_ = false;
    }
    while (bytes > 0) {
        const auto& frame = ring_.at(cursor_);
        const auto part = std::min(bytes, frame.whole() - cursor_offset_);
        cursor_offset_ += part;
        bytes -= part;
        if (cursor_offset_ < frame.whole()) break;
        ++stats_.sent;
        if (cursor_ <= highest_sent_) ++stats_.resent;
        highest_sent_ = std::max(highest_sent_, cursor_);
        ++cursor_;
        cursor_offset_ = 0;
    }
    release();
}

void Session::release() {
    // A frame that is half written stays until it is written, even if the peer has it from an earlier connection.
    if (cursor_offset_ == 0) cursor_ = std::max(cursor_, acked_ + 1);
    ring_.release_to(std::min(acked_, cursor_ - 1));
}

bool Session::take_writable() {
    if (!refused_) return false;
    reserved_ = nullptr;
    if (!ring_.has_room_outside(refused_outside_) || ring_.reserve(wire_size(refused_length_)) == nullptr) return false;
    refused_ = false;
    refused_length_ = refused_outside_ = 0;
    return true;
}

Session::Step Session::broken(const char* reason) {
    ++stats_.broken;
    Step step;
    step.kind = Step::Kind::Broken;
    step.reason = reason;
    return step;
}

Session::Step Session::parse(ByteView data, ByteView placed) {
    Step step;
    step.needed = kHeader;
    if (data.size() < kHeader) return step;
    WireHeader header;
    std::memcpy(&header, data.data(), kHeader);
    if (header.magic != kWireMagic) return broken("a frame does not begin with the frame mark");
    if (header.header_crc != header_crc(header)) return broken("a frame header has a wrong checksum");
    if (header.frame.length > kMaxFramePayload) return broken("a frame is longer than allowed");
    if (header.ack > highest_sent_ && header.ack > acked_) return broken("an acknowledgement of frames never sent");
    const std::size_t size = header.seq == 0 ? kHeader : wire_size(header.frame.length);
    const std::size_t here = placed.empty() ? size : kHeader;
    step.needed = size;
    if (data.size() < here) {
        step.is_next = header.seq == received_ + 1;
        step.header = header.frame;
        return step;
    }
    FT_CHECK(placed.empty() || (header.seq == received_ + 1 && kHeader + placed.size() == size),
             "a payload of %zu bytes was placed for a frame of %zu", placed.size(), size);
    const auto summed = placed.empty() ? data.subspan(kHeader, size - kHeader) : placed;
    // What is here already is not looked at: where it was lent, its sender may have changed it meanwhile.
    if ((header.seq == 0 || header.seq > received_) && crc32c(summed.data(), summed.size()) != header.payload_crc)
        return broken("a payload has a wrong checksum");
    const auto payload = summed.first(header.seq == 0 ? 0 : header.frame.length);
    if (header.seq > received_ + 1) return broken("frames are missing");

    if (header.ack > acked_) {
        acked_ = header.ack;
        release();
    }
    if ((header.flags & kAckNow) != 0) want_ack(false);
    step.consumed = here;
    if (header.seq == 0 || header.seq <= received_) {
        if (header.seq != 0) ++stats_.duplicates;
        step.kind = Step::Kind::Nothing;
        return step;
    }
    received_ = header.seq;
    ++stats_.received;
    unacknowledged_bytes_ += size;
    if (unacknowledged_bytes_ >= ack_after_) want_ack(false);
    step.kind = Step::Kind::Frame;
    step.header = header.frame;
    step.payload = payload;
    return step;
}

}  // namespace ftcomm::tcp
