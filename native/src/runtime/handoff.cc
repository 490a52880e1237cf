#include "runtime/handoff.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "runtime/host.h"

namespace ftcomm {

using handoff::Kind;

namespace {
std::string name_of_socket(const std::string& job, std::uint64_t high, std::uint64_t low) {
    std::string shown = job.substr(0, 24);  // Address allows 64 bytes in all
    for (auto& c : shown)
        if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '.') c = '_';
    char secret[33];
    std::snprintf(secret, sizeof secret, "%016llx%016llx", static_cast<unsigned long long>(high),
                  static_cast<unsigned long long>(low));
    return "ftcomm-" + shown + "-" + secret;
}

// -1: errno
int listener_at(const std::string& name) {
    sockaddr_un address;
    const auto length = handoff::fill_address(name, &address);
    const int fd = handoff::open_socket();
    if (fd < 0) return -1;
    if (::bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 && ::listen(fd, kMaxRanks) == 0) return fd;
    const int error = errno;
    ::close(fd);
    errno = error;
    return -1;
}
}  // namespace

HandoffKey HandoffKey::make(ByteView secret, std::uint64_t job, std::uint64_t boot) {
    ByteWriter w;
    w.text("ftcomm segment").put(job).put(boot);
    auto digest = hmac_sha256(secret, w.take());
    return {Bytes(digest.begin(), digest.end())};
}

HandoffKey::Common HandoffKey::common(const std::string& job, std::uint64_t domain) const {
    ByteWriter w;
    w.text("ftcomm segment of a host").put(domain);
    const auto digest = hmac_sha256(key, w.take());
    std::uint64_t parts[3];
    std::memcpy(parts, digest.data(), sizeof parts);
    return {name_of_socket(job, parts[0], parts[1]), parts[2]};
}

Status HandoffGiver::listen(const std::string& job) {
    nonce_ = random64();
    name_ = name_of_socket(job, random64(), random64());  // nobody else can take it first
    listener_ = listener_at(name_);
    if (listener_ >= 0) return {};
    name_.clear();
    return Status::error(Code::System, std::string("a unix socket for the shared memory of this host: ") + std::strerror(errno));
}

void HandoffGiver::close_own_name() { close_listener(&listener_); }

HandoffGiver::Claim HandoffGiver::claim(const HandoffKey::Common& common) {
    common_ = listener_at(common.name);
    common_nonce_ = common.nonce;
    return common_ >= 0 ? Claim::Held : errno == EADDRINUSE ? Claim::Taken : Claim::Failed;
}

void HandoffGiver::adopt(int listener, const HandoffKey::Common& common) {
    close_listener(&common_);
    common_ = listener;
    common_nonce_ = common.nonce;
}

int HandoffGiver::accept_one(int listener, std::uint64_t nonce) {
    int fd;
    do fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    if (fd < 0) return -1;
    if (!handoff::same_user(fd)) {
        ::close(fd);
        return -1;
    }
    askers_[fd].nonce = nonce;
    return fd;
}

bool HandoffGiver::receive(int fd, Asker& asker) {
    Bytes message;
    auto n = handoff::receive(fd, &message);
    if (n < 0) return errno == EAGAIN;
    Kind kind;
    ByteView body;
    if (n == 0 || !handoff::parse(message, &kind, &body)) return false;
    if (kind == Kind::Ask && !asker.answered) {
        handoff::Ask ask;
        if (!handoff::decode_ask(body, key_.key, asker.nonce, &ask)) return false;
        asker.rank = ask.rank;
        asker.joining = ask.joining;
        asker.answered = handoff::send(fd, handoff::message(Kind::Give, handoff::encode_give(key_.key, ask.nonce, asker.nonce)),
                                       {segment_, common_});
        return asker.answered && !ask.joining;
    }
    if (kind == Kind::Mapped && asker.answered && body.size() == 1) {
        asker.mapped = body[0] != std::byte{0};
        asker.answered = true;
        if (!asker.mapped) asker.joining = true;  // has answered, without the segment: no more to wait for
        return true;
    }
    return false;
}

Status HandoffGiver::gather(const HandoffKey& key, int segment_fd, const RankSet& expected, Time deadline, int stop_fd,
                            RankSet* mapped) {
    key_ = key;
    segment_ = segment_fd;
    for (;;) {
        RankSet answered;
        *mapped = {};
        for (auto& [fd, asker] : askers_) {
            if (asker.mapped || (asker.answered && asker.joining)) answered.add(asker.rank);
            if (asker.mapped) mapped->add(asker.rank);
        }
        auto missing = expected - answered;
        if (missing.empty()) return {};
        std::vector<pollfd> fds{{listener_, POLLIN, 0}, {stop_fd, POLLIN, 0}};
        for (auto& [fd, asker] : askers_) fds.push_back({fd, POLLIN, 0});
        auto left = deadline - IoLoop::now();
        timespec until{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
        int rc = left > 0 ? ::ppoll(fds.data(), fds.size(), &until, nullptr) : 0;
        if (rc < 0 && errno == EINTR) continue;
        if (rc < 0 || fds[1].revents != 0) return Status::error(Code::Closed, "the job was closed while it started");
        if (rc == 0 && IoLoop::now() < deadline) continue;
        if (rc == 0) {
            abort(missing);
            auto status = Status::error(Code::Timeout, "rank(s) " + missing.text() +
                                                           " of this host did not start in time: see "
                                                           "whether they are running");
            status.ranks = missing.list();
            return status;
        }
        if (fds[0].revents != 0) accept_one(listener_, nonce_);
        for (std::size_t i = 2; i < fds.size(); ++i) {
            auto it = askers_.find(fds[i].fd);
            if (fds[i].revents == 0 || it == askers_.end() || receive(it->first, it->second)) continue;
            int rank = it->second.answered ? it->second.rank : -1;
            ::close(it->first);
            askers_.erase(it);
            if (rank < 0 || !expected.has(rank)) continue;
            abort(RankSet::only(rank));
            auto status = Status::error(Code::PeerFailure, "rank " + std::to_string(rank) + " ended while the job started");
            status.ranks = {rank};
            return status;
        }
    }
}

void HandoffGiver::abort(const RankSet& missing) {
    ByteWriter w;
    w.ranks(missing);
    auto message = handoff::message(Kind::Abort, w.take());
    for (auto& [fd, asker] : askers_) handoff::send(fd, message);
}

void HandoffGiver::go(const RankSet& have) {
    ByteWriter w;
    w.ranks(have);
    auto message = handoff::message(Kind::Go, w.take());
    for (auto& [fd, asker] : askers_) {
        handoff::send(fd, message);
        ::close(fd);
    }
    askers_.clear();
}

Status HandoffGiver::serve(IoLoop& loop, const HandoffKey& key, int segment_fd, std::function<bool()> may_give) {
    key_ = key;
    segment_ = segment_fd;
    loop_ = &loop;
    may_give_ = std::move(may_give);
    close_own_name();
    // One of those who have the name accepts: whoever comes too late finds nothing there.
    return loop.add(common_, EPOLLIN, [this](std::uint32_t) {
        if (!may_give_()) {
            close();
            return;
        }
        int fd = accept_one(common_, common_nonce_);
        if (fd < 0) return;
        auto status = loop_->add(fd, EPOLLIN, [this, fd](std::uint32_t) {
            if (receive(fd, askers_[fd])) return;
            loop_->remove(fd);
            ::close(fd);
            askers_.erase(fd);
        });
        if (!status) {
            ::close(fd);
            askers_.erase(fd);
        }
    });
}

void HandoffGiver::close() {
    for (auto& [fd, asker] : askers_) {
        if (loop_ != nullptr) loop_->remove(fd);
        ::close(fd);
    }
    askers_.clear();
    close_listener(&listener_);
    close_listener(&common_);
}

void HandoffGiver::close_listener(int* listener) {
    if (*listener < 0) return;
    if (loop_ != nullptr) loop_->remove(*listener);
    ::close(*listener);
    *listener = -1;
}

void HandoffGiver::close_in_child() {
    for (auto& [fd, asker] : askers_) ::close(fd);
    if (listener_ >= 0) ::close(listener_);
    if (common_ >= 0) ::close(common_);
}

Status HandoffAsker::ask(const std::string& name, std::uint64_t giver_nonce, const HandoffKey& key, int rank,
                         std::uint32_t incarnation, bool joining, Time deadline, int stop_fd, handoff::Descriptors* got) {
    close();
    fd_ = handoff::open_socket();
    if (fd_ < 0) return Status::error(Code::System, std::string("socket: ") + std::strerror(errno));
    sockaddr_un address;
    auto length = handoff::fill_address(name, &address);
    // A full backlog is EAGAIN for a nonblocking unix socket: full of those who have given up waiting for a stopped process.
    int rc;
    do rc = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), length);
    while (rc != 0 && errno == EINTR);
    if (rc != 0) {
        const auto code = errno == ECONNREFUSED || errno == EAGAIN ? Code::PeerFailure : Code::System;
        auto status = Status::error(code, std::string("its shared memory socket: ") + std::strerror(errno));
        close();
        return status;
    }
    if (!handoff::same_user(fd_)) return Status::error(Code::System, "its shared memory socket belongs to another user");
    handoff::Ask mine{rank, incarnation, joining, random64()};
    if (!handoff::send(fd_, handoff::message(Kind::Ask, handoff::encode_ask(mine, key.key, giver_nonce))))
        return Status::error(Code::PeerFailure, std::string("its shared memory socket: ") + std::strerror(errno));
    Bytes message;
    auto status = receive(deadline, stop_fd, &message, got);
    if (!status) return status;
    Kind kind;
    ByteView body;
    if (!handoff::parse(message, &kind, &body) || kind != Kind::Give || got->listener < 0 ||
        !handoff::check_give(body, key.key, mine.nonce, giver_nonce)) {
        got->close();
        return Status::error(Code::System, "its answer does not prove that it is of this job");
    }
    return {};
}

Status HandoffAsker::await_go(bool mapped, Time deadline, int stop_fd, RankSet* have) {
    const std::byte yes[1] = {mapped ? std::byte{1} : std::byte{0}};
    if (!handoff::send(fd_, handoff::message(Kind::Mapped, yes)))
        return Status::error(Code::System, std::string("its shared memory socket: ") + std::strerror(errno));
    Bytes message;
    auto status = receive(deadline, stop_fd, &message, nullptr);
    if (!status) return status;
    Kind kind;
    ByteView body;
    if (!handoff::parse(message, &kind, &body)) return Status::error(Code::System, "its answer is damaged");
    ByteReader r(body);
    auto ranks = r.ranks();
    if (!r.done() || (kind != Kind::Go && kind != Kind::Abort)) return Status::error(Code::System, "its answer is damaged");
    if (kind == Kind::Abort) {
        status = Status::error(Code::Timeout, "rank(s) " + ranks.text() +
                                                  " of this host ended or did not start in time: see whether they are running");
        status.ranks = ranks.list();
        return status;
    }
    *have = ranks;
    close();
    return {};
}

Status HandoffAsker::receive(Time deadline, int stop_fd, Bytes* message, handoff::Descriptors* got) {
    for (;;) {
        int ready = handoff::wait_ready(fd_, POLLIN, deadline, stop_fd);
        if (ready == 0) return Status::error(Code::Timeout, "it did not answer in time");
        if (ready < 0) return Status::error(Code::Closed, "the job was closed while it started");
        auto n = handoff::receive(fd_, message, got);
        if (n > 0) return {};
        if (n == 0 || errno == ECONNRESET) return Status::error(Code::PeerFailure, "it closed the connection");
        if (errno != EAGAIN) return Status::error(Code::System, std::strerror(errno));
    }
}

void HandoffAsker::close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

}  // namespace ftcomm
