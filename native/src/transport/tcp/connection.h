// One tcp socket: non-blocking reads into a buffer, gathering writes. Knows nothing of what the bytes mean.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/bytes.h"
#include "channel/frame.h"
#include "runtime/io_loop.h"
#include "transport/tcp/addresses.h"
#include "transport/tcp/handshake.h"

namespace ftcomm::tcp {

struct Link;

// The descriptors of this transport, readable without a lock: a child after fork closes them whatever the parent's
// threads were doing. Numbers beyond the table are left to close-on-exec.
class FdTable {
public:
    void add(int fd) {
        if (fd >= 0 && fd < kMax) word(fd).fetch_or(bit(fd));
    }
    void remove(int fd) {  // before close: a number in the table is never somebody else's
        if (fd >= 0 && fd < kMax) word(fd).fetch_and(~bit(fd));
    }
    void close_all();

private:
    static constexpr int kMax = 65536;
    std::atomic<std::uint64_t>& word(int fd) { return words_[static_cast<std::size_t>(fd) / 64]; }
    static std::uint64_t bit(int fd) { return std::uint64_t{1} << (static_cast<unsigned>(fd) % 64); }
    std::array<std::atomic<std::uint64_t>, kMax / 64> words_{};
};

enum class IoResult : std::uint8_t { Ok, Again, End };  // End: closed or broken, error() says why (0: end of file)

class Connection {
public:
    Connection(int fd, IoLoop& loop, FdTable& table) : fd_(fd), loop_(loop), table_(table) { table_.add(fd); }
    ~Connection() { close(); }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    void close();
    bool is_open() const { return fd_ >= 0; }
    int fd() const { return fd_; }
    int error() const { return error_; }
    void fail_with(int error) { error_ = error; }
    // Makes the loop see an end: for callers that may not handle one themselves.
    void break_off();

    Status watch(IoLoop::Handler handler, std::uint32_t events);
    void want_write(bool on);

    IoResult read_some();            // into the buffer, as much as there is room for
    ByteView data() const { return {buffer_.get() + begin_, end_ - begin_}; }
    std::byte* mutable_data() { return buffer_.get() + begin_; }
    void consume(std::size_t bytes) { begin_ += bytes; }
    void make_room(std::size_t frame_size);  // so that one frame of this size fits in one piece

    // The frame at the front, which is not whole, has a header of so many bytes: its payload goes there from now on, what has come of it at
    // once, the rest as it is read. What follows the header in the buffer then is the next frame.
    void place(std::size_t header_size, const FrameHeader& header, std::byte* to);
    std::byte* place() const { return placed_; }  // null: it has none
    const FrameHeader& placed_header() const { return placed_header_; }
    ByteView placed() const {  // if it is whole
        return placed_ != nullptr && placed_bytes_ == placed_header_.length ? ByteView(placed_, placed_bytes_) : ByteView();
    }
    void unplace() { placed_ = nullptr; }

    IoResult write(const iovec* parts, int n, std::size_t* written);

    // Handshake bytes; they go before everything else.
    void queue(const Bytes& bytes) { pending_.insert(pending_.end(), bytes.begin(), bytes.end()); }
    IoResult write_pending();
    bool waits_to_write() const { return (events_ & EPOLLOUT) != 0; }
    bool has_pending() const { return !pending_.empty(); }

    // For its owner.
    std::optional<Handshake> handshake;  // until it is established
    std::shared_ptr<Link> link;  // dialer: from the start; acceptor: once established
    bool dialed = false, connecting = false, confirmed = false;
    std::size_t address_index = 0;
    Address remote;
    std::uint64_t generation = 0;
    IoLoop::TimerId deadline = 0;

private:
    ssize_t read_placed(std::size_t left);

    int fd_;
    IoLoop& loop_;
    FdTable& table_;
    bool watched_ = false;
    std::uint32_t events_ = 0;
    int error_ = 0;
    std::unique_ptr<std::byte[]> buffer_;
    std::size_t capacity_ = 0, begin_ = 0, end_ = 0;
    std::byte* placed_ = nullptr;
    std::size_t placed_bytes_ = 0;  // that have come
    FrameHeader placed_header_;
    Bytes pending_;
};

}  // namespace ftcomm::tcp
