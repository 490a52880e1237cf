#include "transport/tcp/handshake.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/failpoint.h"

namespace ftcomm::tcp {
namespace {

constexpr std::uint32_t kMagic = 0x484d4f43;  // "COMH"
constexpr std::size_t kPrefix = 8;            // magic, type, body length
constexpr std::size_t kMaxText = 256;

ByteView view_of(const std::string& s) { return std::as_bytes(std::span(s.data(), s.size())); }

void append(Bytes& out, ByteView more) { out.insert(out.end(), more.begin(), more.end()); }

// What a stranger sends ends up in logs: nothing but plain characters.
std::string printable(const std::string& s) {
    std::string out = s.substr(0, kMaxText);
    std::replace_if(out.begin(), out.end(), [](char c) { return c < 32 || c > 126; }, '?');
    return out;
}

}  // namespace

Digest handshake_key(ByteView secret, const std::string& job, std::uint64_t boot) {
    ByteWriter w;
    w.text("ftcomm handshake").put(kProtocolVersion).text(job).put(boot);
    return hmac_sha256(secret, w.take());
}

std::uint64_t boot_tag(const std::string& job, std::uint64_t boot) {
    ByteWriter w;
    w.text("ftcomm boot tag").put(boot);
    const Digest digest = hmac_sha256(view_of(job), w.take());
    std::uint64_t tag;
    std::memcpy(&tag, digest.data(), sizeof tag);
    return tag;
}

Handshake Handshake::dialer(Identity self, Digest key, Digest challenge, Target target) {
    Handshake h(std::move(self), key, true);
    h.challenge_ = challenge;
    h.target_ = target;
    FT_POINT("handshake.hello");
    h.own_hello_ = h.hello_body(challenge, target);
    h.send(Message::Hello, h.own_hello_);
    return h;
}

Handshake Handshake::acceptor(Identity self, Digest key, Digest challenge) {
    Handshake h(std::move(self), key, false);
    h.challenge_ = challenge;
    return h;
}

Bytes Handshake::hello_body(const Digest& challenge, const Target& target) const {
    FT_CHECK(self_.address.size() <= kMaxAddressBlob, "own address blob of %zu bytes", self_.address.size());
    ByteWriter w;
    w.put(kProtocolVersion).put(self_.job).put(self_.boot).put(self_.world_size).put(self_.slot);
    w.put(self_.incarnation).put(self_.host).put(self_.process);
    w.put(target.slot).put(target.incarnation).put(target.process);
    w.bytes(challenge).bytes(self_.address);
    return w.take();
}

void Handshake::send(Message type, const Bytes& body) {
    FT_CHECK(body.size() <= kMaxHandshakeBody, "handshake message of %zu bytes", body.size());
    ByteWriter w;
    w.put(kMagic).put(type).put(static_cast<std::uint16_t>(body.size()));
    append(output_, w.take());
    append(output_, body);
}

Bytes Handshake::take_output() {
    Bytes out;
    out.swap(output_);
    return out;
}

std::size_t Handshake::feed(ByteView data) {
    std::size_t consumed = 0;
    while (state_ == State::Waiting && consumed < data.size()) {
        // Never more than the current message: what follows the last one is the session's.
        std::size_t want = kPrefix;
        if (input_.size() >= kPrefix) {
            std::uint16_t length;
            std::memcpy(&length, input_.data() + 6, sizeof length);
            want += length;
        }
        const auto part = std::min(want - input_.size(), data.size() - consumed);
        append(input_, data.subspan(consumed, part));
        consumed += part;
        if (input_.size() < kPrefix) break;
        ByteReader reader(input_);
        const auto magic = reader.get<std::uint32_t>();
        const auto type = reader.get<Message>();
        const auto length = reader.get<std::uint16_t>();
        if (magic != kMagic || length > kMaxHandshakeBody) {
            // No answer: whoever this is does not speak this protocol.
            fail(Reject::Stranger, "it does not speak ftcomm's protocol");
            break;
        }
        if (input_.size() < kPrefix + length) continue;
        Bytes message;
        message.swap(input_);
        on_message(type, ByteView(message).subspan(kPrefix));
    }
    return consumed;
}

void Handshake::on_message(Message type, ByteView body) {
    if (type == Message::Reject) return on_reject(body);
    if (type != expected_) return fail(Reject::Stranger, "it sent a handshake message out of order");
    switch (type) {
        case Message::Hello: return on_hello(body);
        case Message::Proof: return on_proof(body);
        case Message::Done: return on_done(body);
        case Message::Reject: break;
    }
}

void Handshake::on_hello(ByteView body) {
    peer_hello_.assign(body.begin(), body.end());
    ByteReader r(body);
    const auto version = r.get<std::uint16_t>();
    if (r.ok() && version != kProtocolVersion) {
        return refuse(Reject::Incompatible, "protocol version " + std::to_string(version) + " meets version " +
                                                std::to_string(kProtocolVersion) + ": install the same ftcomm on all hosts");
    }
    peer_.job = r.get<std::uint64_t>();
    peer_.boot = r.get<std::uint64_t>();
    peer_.world_size = r.get<std::uint32_t>();
    peer_.slot = r.get<std::uint32_t>();
    peer_.incarnation = r.get<std::uint32_t>();
    peer_.host = r.get<std::uint64_t>();
    peer_.process = r.get<std::uint64_t>();
    Target meant;
    meant.slot = r.get<std::uint32_t>();
    meant.incarnation = r.get<std::uint32_t>();
    meant.process = r.get<std::uint64_t>();
    const auto challenge = r.bytes();
    const auto address = r.bytes();
    if (!r.done() || challenge.size() != sizeof(Digest) || address.size() > kMaxAddressBlob) {
        return fail(Reject::Stranger, "its greeting is malformed");
    }
    peer_.address.assign(address.begin(), address.end());
    if (peer_.job != self_.job || peer_.boot != self_.boot) {
        return refuse(Reject::Incompatible, "this is another job (or another start of it): give each job its own name");
    }
    if (peer_.world_size != self_.world_size) {
        return refuse(Reject::Incompatible,
                      "world size " + std::to_string(peer_.world_size) + " meets world size " + std::to_string(self_.world_size));
    }
    if (peer_.slot >= self_.world_size || peer_.slot == self_.slot) {
        return refuse(Reject::Incompatible,
                      "rank " + std::to_string(peer_.slot) + " cannot be a peer of rank " + std::to_string(self_.slot));
    }
    if (dialer_) {
        if (peer_.slot != target_.slot || peer_.incarnation != target_.incarnation ||
            (target_.process != 0 && peer_.process != target_.process)) {
            return refuse(Reject::Stranger, "another process answers at this address");
        }
        expected_ = Message::Proof;
        return;
    }
    if (meant.slot != self_.slot || meant.incarnation != self_.incarnation ||
        (meant.process != 0 && meant.process != self_.process)) {
        return refuse(Reject::Stranger, "rank " + std::to_string(meant.slot) + " incarnation " +
                                            std::to_string(meant.incarnation) + " does not live here");
    }
    FT_POINT("handshake.hello");
    own_hello_ = hello_body(challenge_, {peer_.slot, peer_.incarnation, peer_.process});
    send(Message::Hello, own_hello_);
    FT_POINT("handshake.proof");
    ByteWriter w;
    w.put(std::uint64_t{0}).put(std::uint64_t{0}).bytes(mac("acceptor", 0, 0));
    send(Message::Proof, w.take());
    expected_ = Message::Proof;
}

Digest Handshake::mac(const char* label, std::uint64_t generation, std::uint64_t received) const {
    // The label and the order of the hellos (each with its sender's challenge) keep a proof from being played back.
    ByteWriter w;
    w.text(label).bytes(dialer_ ? own_hello_ : peer_hello_).bytes(dialer_ ? peer_hello_ : own_hello_);
    w.put(generation).put(received);
    return hmac_sha256(key_, w.take());
}

bool Handshake::check_mac(ByteReader& reader, const Digest& expected) {
    const auto given = reader.bytes();
    if (reader.done() && given.size() == expected.size() && constant_time_equal(given, expected)) return true;
    refuse(Reject::Denied, "the proof of the job's secret is wrong: start all ranks with the same secret");
    return false;
}

void Handshake::on_proof(ByteView body) {
    ByteReader r(body);
    const auto generation = r.get<std::uint64_t>();
    const auto received = r.get<std::uint64_t>();
    if (!check_mac(r, mac(dialer_ ? "acceptor" : "dialer", generation, received))) return;
    if (!dialer_) {
        generation_ = generation;
        peer_received_ = received;
    }
    state_ = State::Confirm;
}

void Handshake::confirm(std::uint64_t generation, std::uint64_t received) {
    FT_CHECK(state_ == State::Confirm, "handshake confirmed in state %d", static_cast<int>(state_));
    ByteWriter w;
    w.put(generation).put(received).bytes(mac(dialer_ ? "dialer" : "done", generation, received));
    if (dialer_) {
        FT_POINT("handshake.proof");
        generation_ = generation;
        send(Message::Proof, w.take());
        expected_ = Message::Done;
        state_ = State::Waiting;
    } else {
        FT_POINT("handshake.done");
        send(Message::Done, w.take());
        state_ = State::Done;
    }
}

void Handshake::on_done(ByteView body) {
    ByteReader r(body);
    const auto generation = r.get<std::uint64_t>();
    const auto received = r.get<std::uint64_t>();
    if (!check_mac(r, mac("done", generation, received))) return;
    if (generation != generation_) return fail(Reject::Stranger, "it confirmed another connection");
    peer_received_ = received;
    FT_POINT("handshake.done");
    state_ = State::Done;
}

void Handshake::on_reject(ByteView body) {
    ByteReader r(body);
    auto why = r.get<Reject>();
    const auto generation = r.get<std::uint64_t>();
    const auto text = printable(r.text());
    if (!r.done() || why == Reject::None || why > Reject::Stranger) why = Reject::Stranger;
    rejected_by_peer_ = true;
    // Only a peer that has proved itself may move the connection's number.
    generation_ = dialer_ && expected_ == Message::Done ? generation : 0;
    fail(why, text);
}

void Handshake::reject(Reject why, const std::string& text, std::uint64_t generation) {
    ByteWriter w;
    w.put(why).put(generation).text(printable(text));
    send(Message::Reject, w.take());
    fail(why, text);
}

void Handshake::fail(Reject why, const std::string& text) {
    state_ = State::Failed;
    reason_ = why;
    text_ = text;
}

}  // namespace ftcomm::tcp
