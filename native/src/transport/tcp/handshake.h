// Who is at the other end of a fresh connection: both sides prove that they know the job's secret. Sans-IO.
//
//   dialer                                   acceptor
//   Hello {who, challenge}           ->
//                                    <-      Hello {who, challenge}, Proof = HMAC(key, "acceptor", both hellos)
//   [owner: confirm]
//   Proof = HMAC(key, "dialer", both hellos, generation, received)
//                                    ->      [owner: confirm or reject]
//                                    <-      Done = HMAC(key, "done", both hellos, generation, received)
//   A Reject {reason, text} may come at any place instead.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "base/sha256.h"

namespace ftcomm::tcp {

inline constexpr std::uint16_t kProtocolVersion = 1;
inline constexpr std::size_t kMaxHandshakeBody = 2048;
inline constexpr std::size_t kMaxAddressBlob = 1024;

using Digest = std::array<std::byte, 32>;

// What each side says of itself.
struct Identity {
    std::uint64_t job = 0;          // hash of the job's name
    std::uint64_t boot = 0;         // tag of the boot nonce: tells jobs of the same name apart, does not reveal it
    std::uint32_t world_size = 0;
    std::uint32_t slot = 0;
    std::uint32_t incarnation = 0;
    std::uint64_t host = 0;
    std::uint64_t process = 0;      // random per process: two processes that claim the same rank are told apart
    Bytes address;                  // address blob: a survivor learns where a replacement listens
};

// Whom the dialer means to reach.
struct Target {
    std::uint32_t slot = 0;
    std::uint32_t incarnation = 0;
    std::uint64_t process = 0;      // 0: any
};

enum class Reject : std::uint16_t {
    None = 0,
    Incompatible = 1,   // another job, world size, protocol version: trying again will not help
    Denied = 2,         // the proof is wrong: secrets differ
    Removed = 3,        // this incarnation was voted out
    Superseded = 4,     // there is a newer connection; `generation` says which
    Stranger = 5,       // not this rank here
};

class Handshake {
public:
    enum class State : std::uint8_t {
        Waiting,    // for the peer's next message
        Confirm,    // peer() is authenticated: the owner calls confirm or reject
        Done,
        Failed,     // reason(), text()
    };

    // key: 32 bytes from handshake_key. challenge: 32 fresh random bytes.
    static Handshake dialer(Identity self, Digest key, Digest challenge, Target target);
    static Handshake acceptor(Identity self, Digest key, Digest challenge);

    // Consumes what it can. Bytes after the handshake's end are left: they belong to the session.
    std::size_t feed(ByteView data);
    // `generation`: dialer: of the connection to be; acceptor: the same as generation(). `received`: session position.
    void confirm(std::uint64_t generation, std::uint64_t received);
    void reject(Reject why, const std::string& text, std::uint64_t generation = 0);

    Bytes take_output();            // to be written; also after Failed (the reject)
    State state() const { return state_; }
    bool is_dialer() const { return dialer_; }
    Reject reason() const { return reason_; }
    const std::string& text() const { return text_; }
    bool rejected_by_peer() const { return rejected_by_peer_; }

    // From Confirm on.
    const Identity& peer() const { return peer_; }
    std::uint64_t generation() const { return generation_; }     // acceptor at Confirm; after Superseded: the peer's
    std::uint64_t peer_received() const { return peer_received_; }  // acceptor at Confirm, dialer at Done

private:
    enum class Message : std::uint16_t { Hello = 1, Proof = 2, Done = 3, Reject = 4 };
    Handshake(Identity self, Digest key, bool dialer) : self_(std::move(self)), key_(key), dialer_(dialer) {}

    void send(Message type, const Bytes& body);
    Bytes hello_body(const Digest& challenge, const Target& target) const;
    void on_message(Message type, ByteView body);
    void on_hello(ByteView body);
    void on_proof(ByteView body);
    void on_done(ByteView body);
    void on_reject(ByteView body);
    Digest mac(const char* label, std::uint64_t generation, std::uint64_t received) const;
    bool check_mac(ByteReader& reader, const Digest& expected);
    void fail(Reject why, const std::string& text);
    void refuse(Reject why, const std::string& text) { reject(why, text, 0); }

    Identity self_, peer_;
    Digest key_;
    bool dialer_;
    Digest challenge_{};
    Target target_;
    State state_ = State::Waiting;
    Message expected_ = Message::Hello;
    Bytes own_hello_, peer_hello_, output_, input_;
    std::uint64_t generation_ = 0, peer_received_ = 0;
    Reject reason_ = Reject::None;
    std::string text_;
    bool rejected_by_peer_ = false;
};

// One key per job and start: without a secret the boot nonce alone keeps other jobs' processes out.
Digest handshake_key(ByteView secret, const std::string& job, std::uint64_t boot);
std::uint64_t boot_tag(const std::string& job, std::uint64_t boot);

}  // namespace ftcomm::tcp
