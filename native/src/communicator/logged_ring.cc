#include "communicator/logged_ring.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/copy.h"
#include "base/crc32c.h"
#include "base/reduce.h"

namespace ftcomm {

namespace {
constexpr std::int64_t kNothing = -1;  // the tag of what goes out in place of sums
constexpr std::uint64_t kWhole = 32u << 10;
}  // namespace

// A small sum goes round as one chunk, which begins at rank 0: a message costs more than its bytes.
bool LoggedRing::whole() const { return total() <= kWhole; }

// Of two ranks one would only wait for the other: both send theirs, and both make the sum.
bool LoggedRing::exchanges() const { return size() == 2 && whole(); }

// Of a message: what it is part of. Its length does not say: one rank's chunk may be as long as another one's whole sum.
std::int64_t LoggedRing::tag() const {
    const auto& d = queue_.front().desc;
    ByteWriter w;
    w.put(d.count).put(static_cast<std::uint8_t>(d.dtype)).put(static_cast<std::uint8_t>(d.op));
    if (exchanges()) w.put(std::uint8_t{1});  // an input: what logs and ranks of an earlier version have here is a sum
    return static_cast<std::int64_t>(hash64(w.view()) >> 1);
}

// In step k of the first half this rank adds to the part that started k + 1 ranks before it; in the second half finals come, its
// predecessor's first.
int LoggedRing::chunk() const {
    if (exchanges()) return 0;
    const int n = size(), k = reducing() ? step_ + 1 : step_ - (n - 1);
    return ((rank_ - k) % n + n) % n;
}
std::uint64_t LoggedRing::total() const { return queue_.front().desc.count * size_of(queue_.front().desc.dtype); }
std::uint64_t LoggedRing::begin(int chunk) const {
    const auto count = queue_.front().desc.count;
    if (whole()) return chunk == 0 ? 0 : count;
    return count * static_cast<std::uint64_t>(chunk) / spec_.members.size();
}
std::uint64_t LoggedRing::bytes(int chunk) const {
    return (begin(chunk + 1) - begin(chunk)) * size_of(queue_.front().desc.dtype);
}
std::byte* LoggedRing::at(int chunk) const {
    const auto& d = queue_.front().desc;
    return static_cast<std::byte*>(d.recv) + begin(chunk) * size_of(d.dtype);
}

void LoggedRing::post(const RequestPtr& request, const OpDesc& desc, Time timeout) {
    if (!broken_) {
        core_.finish(request, broken_);
        return;
    }
    queue_.push_back({request, desc, timeout, core_.now + timeout});
    if (queue_.size() == 1) start();
    pump();
}

void LoggedRing::postpone() {
    for (auto& op : queue_) op.deadline = std::max(op.deadline, core_.now + op.timeout);
}

void LoggedRing::start() {
    step_ = 0;
    if (size() == 1) {
        const auto& d = queue_.front().desc;
        if (d.op == ReduceOp::PremulSum) scale(d.dtype, d.recv, d.recv, d.count, d.factor);
        finish({});
        return;
    }
    const int first = exchanges() ? 0 : rank_;
    if (!travels(first) || send(own(first, 0, bytes(first)), first)) next();
}

// What this rank adds: bytes [at, at + bytes) of the chunk. Its buffer stays as it is until finals come (invariant B).
const std::byte* LoggedRing::own(int chunk, std::uint64_t at, std::uint64_t bytes) {
    const auto& d = queue_.front().desc;
    const auto* mine = this->at(chunk) + at;
    if (d.op != ReduceOp::PremulSum) return mine;
    scaled_.resize(bytes);
    scale(d.dtype, scaled_.data(), mine, bytes / size_of(d.dtype), d.factor);
    return scaled_.data();
}

bool LoggedRing::send(const std::byte* data, int chunk) {
    const auto sending = std::make_shared<Request>();
    pairs_->send(sending, data, bytes(chunk), after(), tag());
    if (sending->status) return true;
    finish(sending->status);
    return false;
}

// Into no buffer: it is read where it is.
void LoggedRing::next() {
    while (!travels(chunk())) {
        if (is_last()) {
            finish({});
            return;
        }
        ++step_;
    }
    receiving_ = std::make_shared<Request>();
    pairs_->recv(receiving_, nullptr, bytes(chunk()), before(), kAnyTag, queue_.front().deadline);
}

void LoggedRing::pump() {
    while (receiving_ != nullptr && receiving_->done.load(std::memory_order_relaxed)) advance();
}

void LoggedRing::advance() {
    const auto got = std::exchange(receiving_, nullptr);
    const int c = chunk();
    LogRecord came;
    auto found = got->status;
    if (found) found = pairs_->received(before(), &came);
    if (found.code == Code::Truncated || (found && (got->bytes != bytes(c) || came.tag != tag()))) {
        found = say_nothing();
        if (found)
            found = Status::error(Code::Mismatch,
                                  "all_reduce (ring-logged): another rank has another number of elements, data type or "
                                  "operation (rank " +
                                      std::to_string(before()) + ", or one before it): call it alike on all ranks");
    }
    if (!found) {
        finish(std::move(found));
        return;
    }
    const bool last = is_last();
    auto status = exchanges() ? add(came) : last ? keep(c, came) : pass_on(c);
    if (!status || last) {
        finish(std::move(status));
        return;
    }
    ++step_;
    next();
}

// In place of all that would still go out: so that the others come to know, and none waits for what does not come.
Status LoggedRing::say_nothing() {
    for (; !is_last(); ++step_) {
        const auto sending = std::make_shared<Request>();
        if (travels(chunk())) pairs_->send(sending, nullptr, 0, after(), kNothing);
        if (!sending->status) return sending->status;
    }
    return {};
}

// From the record that came to the one that goes out, with this rank's part added or as it is; a final also into the buffer. Its sum is
// looked at on the way: if it is not what its sender wrote, there is no record.
Status LoggedRing::pass_on(int chunk) {
    const auto& d = queue_.front().desc;
    const auto into = into_for(total()), into_log = into_for(bytes(chunk), kLongMessage);
    const bool adds = reducing(), makes_final = step_ == size() - 2;
    LogRecord came;
    std::uint32_t crc = 0, made_crc = 0;
    const auto make = [&](std::byte* to, std::uint64_t at, std::uint64_t n, std::optional<std::uint32_t>* sum) -> Status {
        if (at == 0)  // only now: room for the record to be may have been made by moving others
            if (auto s = pairs_->received(before(), &came); !s) return s;
        const auto* from = came.payload.data() + at;
        crc = adds ? crc32c(from, n, crc) : crc32c_copy(to, from, n, crc, into_log);
        if (at + n == bytes(chunk) && crc != came.crc) return damaged();
        if (n == 0) return {};
        if (!adds) {
            *sum = crc;
            copy(this->at(chunk) + at, from, n, into);
            return {};
        }
        const auto count = n / size_of(d.dtype);
        if (into_log == Into::Memory) made_.resize(n);
        auto* made = into_log == Into::Memory ? made_.data() : to;
        const auto divisor = makes_final && d.op == ReduceOp::Avg ? static_cast<std::uint32_t>(size()) : 1;
        reduce(d.dtype, d.op, made, from, own(chunk, at, n), count, divisor);
        if (into_log == Into::Memory) *sum = made_crc = crc32c_copy(to, made, n, made_crc, into_log);
        if (makes_final) copy(this->at(chunk) + at, made, n, into);
        return {};
    };
    const auto sending = std::make_shared<Request>();
    pairs_->send_made(sending, bytes(chunk), after(), tag(), make);
    return sending->status;
}

// The last final that comes goes nowhere else. A short one is looked at before any of it is in the buffer, as in pass_on.
Status LoggedRing::keep(int chunk, const LogRecord& came) {
    const auto n = came.payload.size();
    if (n <= kWhole) {
        if (auto s = pairs_->check_received(before()); !s) return s;
        copy_bytes(at(chunk), came.payload.data(), n);
        return {};
    }
    const auto crc = crc32c_copy(at(chunk), came.payload.data(), n, 0, into_for(total()));
    return crc == came.crc ? Status{} : damaged();
}

// In the order of the ranks on both, as in a small sum of any other kind: the same bits, but for those of NaNs, from processors of two kinds.
Status LoggedRing::add(const LogRecord& came) {
    if (auto s = pairs_->check_received(before()); !s) return s;
    const auto& d = queue_.front().desc;
    const auto* mine = own(0, 0, total());
    const auto* theirs = came.payload.data();
    reduce(d.dtype, d.op, at(0), rank_ == 0 ? mine : theirs, rank_ == 0 ? theirs : mine, d.count, d.op == ReduceOp::Avg ? 2 : 1);
    return {};
}

Status LoggedRing::damaged() {
    auto s = pairs_->check_received(before());
    return s ? Status::error(Code::LogCorrupt, "a record of the ring changed while it was read") : s;
}

void LoggedRing::finish(Status status) {
    const auto op = std::move(queue_.front());
    queue_.pop_front();
    receiving_ = nullptr;
    if (status) {
        auto& outcome = op.request->outcome;
        outcome.contributors = RankSet::first(size());
        outcome.chunks = {{0, op.desc.count, outcome.contributors}};
        outcome.epoch = core_.view.epoch;
    } else {
        if (status.operation.empty()) status.operation = "all_reduce (ring-logged) in communicator " + spec_.name;
        broken_ = status;
    }
    core_.finish(op.request, std::move(status));
    if (!broken_) fail_all(broken_);
    else if (!queue_.empty()) start();
}

void LoggedRing::fail_all(const Status& status) {
    if (queue_.empty()) return;
    broken_ = status;
    receiving_ = nullptr;
    for (auto queue = std::exchange(queue_, {}); auto& op : queue) core_.finish(op.request, status);
}

bool LoggedRing::fail(const RequestPtr& request, Code why) {
    for (const auto& op : queue_) {
        if (op.request != request) continue;
        if (receiving_ != nullptr) pairs_->cancel(receiving_);
        fail_all(Status::error(why, "an all_reduce (ring-logged) of communicator " + spec_.name + " was given up"));
        return true;
    }
    return false;
}

}  // namespace ftcomm
