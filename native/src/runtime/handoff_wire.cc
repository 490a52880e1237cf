#include "runtime/handoff_wire.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "runtime/io_loop.h"

namespace ftcomm::handoff {
namespace {

Bytes with_proof(Bytes body, ByteView key, const char* role, std::uint64_t other_nonce) {
    ByteWriter w;
    w.text(role).bytes(body).put(other_nonce);
    auto proof = hmac_sha256(key, w.take());
    body.insert(body.end(), proof.begin(), proof.end());
    return body;
}

bool check_proof(ByteView all, ByteView key, const char* role, std::uint64_t other_nonce, ByteView* body) {
    constexpr auto size = std::tuple_size_v<Sha256Digest>;
    if (all.size() < size) return false;
    *body = all.first(all.size() - size);
    auto right = with_proof(Bytes(body->begin(), body->end()), key, role, other_nonce);
    return constant_time_equal(all, right);
}

}  // namespace

Bytes message(Kind kind, ByteView body) {
    ByteWriter w;
    w.put(kMagic).put(kind).bytes(body);
    return w.take();
}

bool parse(ByteView message, Kind* kind, ByteView* body) {
    ByteReader r(message);
    auto magic = r.get<std::uint32_t>();
    *kind = r.get<Kind>();
    *body = r.bytes();
    return r.done() && magic == kMagic;
}

Bytes encode_ask(const Ask& ask, ByteView key, std::uint64_t giver_nonce) {
    ByteWriter w;
    w.put(ask.rank).put(ask.incarnation).put(static_cast<std::uint8_t>(ask.joining)).put(ask.nonce);
    return with_proof(w.take(), key, "ftcomm segment asker", giver_nonce);
}

bool decode_ask(ByteView all, ByteView key, std::uint64_t giver_nonce, Ask* out) {
    ByteView body;
    if (!check_proof(all, key, "ftcomm segment asker", giver_nonce, &body)) return false;
    ByteReader r(body);
    out->rank = r.get<std::int32_t>();
    out->incarnation = r.get<std::uint32_t>();
    out->joining = r.get<std::uint8_t>() != 0;
    out->nonce = r.get<std::uint64_t>();
    return r.done() && out->rank >= 0 && out->rank < kMaxRanks;
}

Bytes encode_give(ByteView key, std::uint64_t asker_nonce, std::uint64_t giver_nonce) {
    ByteWriter w;
    w.put(giver_nonce);
    return with_proof(w.take(), key, "ftcomm segment giver", asker_nonce);
}

bool check_give(ByteView all, ByteView key, std::uint64_t asker_nonce, std::uint64_t giver_nonce) {
    ByteView body;
    if (!check_proof(all, key, "ftcomm segment giver", asker_nonce, &body)) return false;
    ByteReader r(body);
    auto nonce = r.get<std::uint64_t>();
    return r.done() && nonce == giver_nonce;
}

int open_socket() { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

socklen_t fill_address(const std::string& name, void* out) {
    auto* address = static_cast<sockaddr_un*>(out);
    *address = sockaddr_un{};
    address->sun_family = AF_UNIX;
    auto n = std::min(name.size(), sizeof address->sun_path - 1);
    std::memcpy(address->sun_path + 1, name.data(), n);  // a leading zero byte: no name in the file system
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
}

bool same_user(int fd) {
    ucred who{};
    socklen_t length = sizeof who;
    return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == ::getuid();
}

void Descriptors::close() {
    for (int* fd : {&segment, &listener}) {
        if (*fd >= 0) ::close(*fd);
        *fd = -1;
    }
}

bool send(int fd, ByteView message, const Descriptors& with) {
    iovec part{const_cast<std::byte*>(message.data()), message.size()};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    const int both[2] = {with.segment, with.listener};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof both)] = {};
    if (with.segment >= 0) {
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        auto* c = CMSG_FIRSTHDR(&header);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof both);
        std::memcpy(CMSG_DATA(c), both, sizeof both);
    }
    ssize_t n;
    do n = ::sendmsg(fd, &header, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n == static_cast<ssize_t>(message.size());
}

ssize_t receive(int fd, Bytes* message, Descriptors* with) {
    message->resize(1024);
    iovec part{message->data(), message->size()};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 8)];
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    ssize_t n;
    do n = ::recvmsg(fd, &header, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0) return n;
    for (auto* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        for (std::size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len; ++i) {
            int got;
            std::memcpy(&got, CMSG_DATA(c) + i * sizeof(int), sizeof got);
            if (with != nullptr && with->segment < 0) with->segment = got;
            else if (with != nullptr && with->listener < 0) with->listener = got;
            else ::close(got);  // not asked for
        }
    }
    message->resize(static_cast<std::size_t>(n));
    return n;
}

int wait_ready(int fd, short events, Time deadline, int stop_fd) {
    for (;;) {
        auto left = deadline - IoLoop::now();
        if (left <= 0) return 0;
        pollfd fds[2] = {{fd, events, 0}, {stop_fd, POLLIN, 0}};
        timespec until{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
        int rc = ::ppoll(fds, stop_fd >= 0 ? 2 : 1, &until, nullptr);
        if (rc < 0 && errno != EINTR) return -1;
        if (rc <= 0) continue;
        if (fds[0].revents != 0) return 1;  // first: what has come counts, also from somebody who has ended since
        return -1;
    }
}

}  // namespace ftcomm::handoff
