#include "transport/tcp/connection.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace ftcomm::tcp {
namespace {

constexpr std::size_t kFirstBuffer = 4096;     // enough for a handshake: strangers get no more
constexpr std::size_t kSessionBuffer = 512u << 10;
constexpr std::size_t kBehindPlaced = 1u << 10;

}  // namespace

void FdTable::close_all() {
    for (std::size_t i = 0; i < words_.size(); ++i) {
        for (auto w = words_[i].exchange(0); w != 0; w &= w - 1) { ::close(static_cast<int>(i * 64) + std::countr_zero(w)); }
    }
}

void Connection::close() {
    if (fd_ < 0) return;
    if (watched_) loop_.remove(fd_);
    table_.remove(fd_);
    ::close(fd_);
    fd_ = -1;
    watched_ = false;
}

void Connection::break_off() {
    if (fd_ >= 0) ::shutdown(fd_, SHUT_RDWR);
}

Status Connection::watch(IoLoop::Handler handler, std::uint32_t events) {
    auto status = loop_.add_socket(fd_, events, std::move(handler));
    watched_ = status.ok();
    events_ = events;
    return status;
}

void Connection::want_write(bool on) {
    const std::uint32_t events = EPOLLIN | (on ? std::uint32_t{EPOLLOUT} : 0u);
    if (events == events_ || fd_ < 0) return;
    events_ = events;
    loop_.modify(fd_, events);
}

void Connection::make_room(std::size_t frame_size) {
    const std::size_t held = end_ - begin_;
    if (begin_ == end_) begin_ = end_ = 0;
    const std::size_t wanted = std::max(frame_size, link != nullptr ? kSessionBuffer : kFirstBuffer);
    if (capacity_ < wanted) {
        auto larger = std::make_unique_for_overwrite<std::byte[]>(wanted);
        if (held > 0) std::memcpy(larger.get(), buffer_.get() + begin_, held);
        buffer_ = std::move(larger);
        capacity_ = wanted;
        begin_ = 0;
        end_ = held;
    } else if (capacity_ - begin_ < frame_size || capacity_ == end_) {
        std::memmove(buffer_.get(), buffer_.get() + begin_, held);
        begin_ = 0;
        end_ = held;
    }
}

void Connection::place(std::size_t header_size, const FrameHeader& header, std::byte* to) {
    placed_ = to;
    placed_header_ = header;
    placed_bytes_ = end_ - begin_ - header_size;
    std::memcpy(to, buffer_.get() + begin_ + header_size, placed_bytes_);
    end_ -= placed_bytes_;
}

IoResult Connection::read_some() {
    const auto left = placed_ != nullptr ? placed_header_.length - placed_bytes_ : 0;
    for (;;) {
        const auto n = left > 0 ? read_placed(left) : ::recv(fd_, buffer_.get() + end_, capacity_ - end_, MSG_DONTWAIT);
        if (n > 0) {
            const auto there = std::min(static_cast<std::size_t>(n), left);
            placed_bytes_ += there;
            end_ += static_cast<std::size_t>(n) - there;
            return IoResult::Ok;
        }
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return IoResult::Again;
        error_ = n == 0 ? 0 : errno;
        return IoResult::End;
    }
}

// And only a little more: it may have the header of another one that has a place.
ssize_t Connection::read_placed(std::size_t left) {
    iovec parts[2] = {{placed_ + placed_bytes_, left}, {buffer_.get() + end_, std::min(capacity_ - end_, kBehindPlaced)}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    return ::recvmsg(fd_, &message, MSG_DONTWAIT);
}

IoResult Connection::write(const iovec* parts, int n, std::size_t* written) {
    *written = 0;
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = static_cast<std::size_t>(n);
    for (;;) {
        const auto sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            *written = static_cast<std::size_t>(sent);
            return IoResult::Ok;
        }
        if (errno == EINTR) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return IoResult::Again;
        error_ = errno;
        return IoResult::End;
    }
}

IoResult Connection::write_pending() {
    while (!pending_.empty()) {
        const iovec part{pending_.data(), pending_.size()};
        std::size_t written;
        if (const auto r = write(&part, 1, &written); r != IoResult::Ok) return r;
        pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(written));
    }
    return IoResult::Ok;
}

}  // namespace ftcomm::tcp
