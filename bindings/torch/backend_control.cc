// Coalescing, groups made of groups, and the end.
#include "backend.h"

#include <algorithm>
#include <utility>

namespace ftcomm_torch {
namespace {

constexpr int kShrinkAbort = 1;  // torch.distributed's SHRINK_ABORT

// FNV-1a: the members of a new group compute its id, each by itself.
class Hash {
public:
    void add(const void* data, std::size_t size) {
        const auto* bytes = static_cast<const unsigned char*>(data);
        for (std::size_t i = 0; i < size; ++i) value_ = (value_ ^ bytes[i]) * 1099511628211ULL;
    }
    void add(std::uint64_t number) { add(&number, sizeof number); }
    std::uint64_t value() const { return value_ == 0 ? 1 : value_; }

private:
    std::uint64_t value_ = 14695981039346656037ULL;
};

std::string listed(const std::vector<int>& ranks) {
    std::string out = "[";
    for (std::size_t i = 0; i < ranks.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
    return out + "]";
}

}  // namespace

void FtBackend::startCoalescing() {
    // Operations start at once also in between; only their Works are gathered. An earlier block that an exception ended
    // without endCoalescing leaves nothing behind.
    std::lock_guard<std::mutex> lock(order_);
    coalesced_.emplace();
}

FtBackend::WorkPtr FtBackend::endCoalescing() {
    std::vector<c10::intrusive_ptr<FtWork>> works;
    {
        std::lock_guard<std::mutex> lock(order_);
        if (coalesced_) works = std::move(*coalesced_);
        coalesced_.reset();
    }
    return c10::make_intrusive<FtGroupWork>(std::move(works), getRank());
}

c10::intrusive_ptr<FtBackend> FtBackend::derived(const std::vector<std::int32_t>& ranks, const std::string& label,
                                                 double timeout) {
    Hash hash;
    hash.add(id_);
    hash.add(static_cast<std::uint64_t>(++derived_));
    hash.add(label.data(), label.size());
    std::vector<std::int32_t> slots;
    int own = -1;
    for (const std::int32_t rank : ranks) {
        if (rank == getRank()) own = static_cast<int>(slots.size());
        slots.push_back(slots_[static_cast<std::size_t>(rank)]);
        hash.add(static_cast<std::uint64_t>(slots.back()));
    }
    if (own < 0) return nullptr;
    return c10::make_intrusive<FtBackend>(job_, hash.value(), label, std::move(slots), own, policy_, timeout);
}

c10::intrusive_ptr<c10d::Backend> FtBackend::shrink(const std::vector<std::int64_t>& exclude, int flags,
                                                    const c10::intrusive_ptr<Options>& opts) {
    if ((flags & kShrinkAbort) != 0) abort();
    std::vector<std::int32_t> remaining;
    for (int rank = 0; rank < getSize(); ++rank) {
        if (std::find(exclude.begin(), exclude.end(), rank) == exclude.end()) remaining.push_back(rank);
    }
    const double timeout = opts ? static_cast<double>(opts->timeout.count()) / 1000.0 : timeout_.load();
    auto group = derived(remaining, name_ + "/shrunk" + std::to_string(derived_ + 1), timeout);
    if (!group) refuse("shrink_group: this rank is itself to be excluded; it must not call shrink_group");
    try {
        // Everybody that remains is there and means the same members; otherwise all of them learn it here.
        group->barrier(c10d::BarrierOptions())->wait();
    } catch (const FtError& e) {
        group->close_comm(/*tell=*/false);
        if (e.code != FT_PEER_FAILURE) throw;
        std::vector<std::int32_t> dead(static_cast<std::size_t>(getSize()), 0);
        std::int32_t n = 0;
        job_->with([&](ft_job* job) { return ft_comm_failed(job, id_, dead.data(), &n); });
        dead.resize(static_cast<std::size_t>(n));
        std::sort(dead.begin(), dead.end());
        std::rethrow_exception(own_error(FT_PEER_FAILURE,
                                         "shrink_group: more ranks of group " + name_ + " are dead: " + listed(dead) +
                                             ". Call shrink_group again with all of them on every remaining rank.",
                                         listed(dead)));
    }
    return group;
}

c10::intrusive_ptr<c10d::Backend> FtBackend::split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                                   const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& opts) {
    for (const int rank : ranks) {
        if (rank < 0 || rank >= getSize()) refuse(c10::str("split: rank ", rank, " is not in this group of ", getSize()));
    }
    const double timeout = opts ? static_cast<double>(opts->timeout.count()) / 1000.0 : timeout_.load();
    const std::string label = opts && !opts->group_name.empty() ? opts->group_name : name_ + "/split";
    return derived({ranks.begin(), ranks.end()}, label, timeout);
}

c10::intrusive_ptr<c10d::Backend::Options> FtBackend::getBackendOptions() {
    auto options = c10::make_intrusive<FtOptions>(std::chrono::milliseconds(static_cast<std::int64_t>(timeout_.load() * 1000)));
    static const char* kPolicies[] = {"raise", "lossy", "replay"};
    options->policy = kPolicies[policy_];
    options->group_name = name_;
    return options;
}

c10d::ErrorType FtBackend::getError() {
    switch (last_error_->load()) {
        case FT_OK: return c10d::ErrorType::SUCCESS;
        case FT_TIMEOUT: return c10d::ErrorType::TIMEOUT;
        case FT_PEER_FAILURE:
        case FT_REVOKED:
        case FT_MISMATCH: return c10d::ErrorType::REMOTE_ERROR;
        default: return c10d::ErrorType::COMM_ERROR;
    }
}

void FtBackend::setTimeout(std::chrono::milliseconds timeout) { timeout_ = seconds(timeout); }

std::uint64_t FtBackend::getSequenceNumberForGroup() {
    std::uint64_t number = 0;
    job_->with([&](ft_job* job) {
        number = ft_comm_seq(job, id_);
        return static_cast<int>(FT_OK);
    });
    return number;
}

std::vector<std::uint8_t> FtBackend::alive() {
    std::vector<std::uint8_t> flags(static_cast<std::size_t>(getSize()), 0);
    job_->with([&](ft_job* job) { return ft_comm_alive(job, id_, flags.data()); });
    return flags;
}

bool FtBackend::solo() {
    return job_->with([&](ft_job* job) { return ft_comm_solo(job, id_); }) == 1;
}

void FtBackend::abort() {
    aborted_ = true;
    job_->with([&](ft_job* job) { return ft_comm_revoke(job, id_); });
}

void FtBackend::close_comm(bool tell) {
    {
        std::unique_lock<std::mutex> lock(order_);
        if (closed_.exchange(true)) return;
        lane_stop_ = true;
        lane_wake_.notify_one();
        // It waits for a device, which may hang: it ends by itself when that comes. Or it is this thread, in a callback.
        if ((lane_waits_ || in_lane()) && lane_thread_.joinable()) lane_thread_.detach();
    }
    if (lane_thread_.joinable()) lane_thread_.join();
    job_->with([&](ft_job* job) { return ft_comm_close(job, id_); });
    job_->detach(tell);
}

void FtBackend::shutdown() { close_comm(/*tell=*/true); }

}  // namespace ftcomm_torch
