// Messages and sockets of the hand-out.
#pragma once

#include <string>

#include "base/bytes.h"
#include "base/sha256.h"
#include "base/status.h"
#include "communicator/request.h"

namespace ftcomm::handoff {

enum class Kind : std::uint8_t { Ask = 1, Give = 2, Mapped = 3, Go = 4, Abort = 5 };
inline constexpr std::uint32_t kMagic = 0x48435446;  // "FTCH"

Bytes message(Kind kind, ByteView body);
bool parse(ByteView message, Kind* kind, ByteView* body);

struct Ask {
    std::int32_t rank = -1;
    std::uint32_t incarnation = 0;
    bool joining = false;
    std::uint64_t nonce = 0;
};
Bytes encode_ask(const Ask& ask, ByteView key, std::uint64_t giver_nonce);
bool decode_ask(ByteView body, ByteView key, std::uint64_t giver_nonce, Ask* out);  // false: malformed or no proof
Bytes encode_give(ByteView key, std::uint64_t asker_nonce, std::uint64_t giver_nonce);
bool check_give(ByteView body, ByteView key, std::uint64_t asker_nonce, std::uint64_t giver_nonce);

// SOCK_SEQPACKET in the abstract namespace; nonblocking. -1 and errno on error.
int open_socket();
socklen_t fill_address(const std::string& name, void* sockaddr_un);
bool same_user(int fd);
struct Descriptors {
    int segment = -1, listener = -1;
    void close();
};
bool send(int fd, ByteView message, const Descriptors& with = {});
// > 0: bytes, 0: closed, -1: errno. The descriptors are the caller's; without `with` none are taken.
ssize_t receive(int fd, Bytes* message, Descriptors* with = nullptr);
// 1: ready, 0: deadline, -1: stop_fd or a broken poll.
int wait_ready(int fd, short events, Time deadline, int stop_fd);

}  // namespace ftcomm::handoff
