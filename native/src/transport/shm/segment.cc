#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace ftcomm::shm {
namespace {

constexpr std::uint64_t kLargest = 64ull << 30;
constexpr std::uint64_t kSmallest = 512ull << 20;

Status system_error(const std::string& what) { return Status::error(Code::System, what + ": " + std::strerror(errno)); }

}  // namespace

Status Segment::create(std::uint64_t job, std::uint64_t boot, int world_size) {
    fd_ = ::memfd_create("ftcomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) return system_error("memfd_create for the host's shared memory segment");
    std::uint64_t largest = kLargest;
    rlimit limit{};
    // Beyond RLIMIT_FSIZE ftruncate would raise SIGXFSZ, so the limit is looked at first.
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < largest)
        largest = limit.rlim_cur & ~std::uint64_t{4095};
    Status status = Status::error(Code::System, "the file size limit (ulimit -f) leaves no room for a segment");
    world_size_ = world_size;
    for (std::uint64_t size = largest; size >= kSmallest; size /= 2) {
        size &= ~std::uint64_t{4095};
        if (::ftruncate(fd_, static_cast<off_t>(size)) != 0) {
            status = system_error("ftruncate of the host's shared memory segment");
            continue;
        }
        size_ = size;
        status = map();
        if (status) break;
    }
    if (!status) {
        close();
        return status;
    }
    // The size is final: a later truncation by anybody would turn accesses into SIGBUS.
    ::fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    Header& h = header();
    h.version = kVersion;
    h.world_size = static_cast<std::uint32_t>(world_size);
    h.boot = boot;
    h.job = job;
    h.size = size_;
    h.used.store(kArenaAt, std::memory_order_relaxed);
    std::atomic_ref<std::uint64_t>(h.magic).store(kMagic, std::memory_order_release);
    return {};
}

Status Segment::open(int fd, std::uint64_t job, std::uint64_t boot, int world_size) {
    fd_ = fd;
    world_size_ = world_size;
    struct stat info{};
    if (::fstat(fd_, &info) != 0) {
        auto status = system_error("fstat of the received segment");
        close();
        return status;
    }
    size_ = static_cast<std::uint64_t>(info.st_size);
    if (size_ < kArenaAt) {
        close();
        return Status::error(Code::System, "the received descriptor is no ftcomm segment");
    }
    auto status = map();
    if (!status) {
        close();
        return status;
    }
    const Header& h = header();
    if (h.magic != kMagic || h.version != kVersion || h.size != size_ || h.job != job || h.boot != boot ||
        h.world_size != static_cast<std::uint32_t>(world_size)) {
        close();
        return Status::error(Code::System, "the received segment belongs to another job or version of ftcomm");
    }
    return {};
}

Status Segment::map() {
    void* p = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (p == MAP_FAILED) return system_error("mmap of the host's shared memory segment");
    // A forked child does not get the mapping (M7); a core dump does not get a sparse giant.
    if (::madvise(p, size_, MADV_DONTFORK) != 0) {
        auto status = system_error("madvise(MADV_DONTFORK)");
        ::munmap(p, size_);
        return status;
    }
    ::madvise(p, size_, MADV_DONTDUMP);
    base_ = static_cast<std::byte*>(p);
    return {};
}

void Segment::close() {
    if (base_ != nullptr) ::munmap(base_, size_);
    if (fd_ >= 0) ::close(fd_);
    base_ = nullptr;
    fd_ = -1;
    size_ = 0;
}

Offset Segment::allocate(std::uint64_t bytes, std::uint64_t align) {
    if (bytes > size_) return 0;
    auto& used = header().used;
    auto at = used.load(std::memory_order_relaxed);
    for (;;) {
        auto start = (at + align - 1) & ~(align - 1);
        if (start < kArenaAt || start > size_ - bytes) return 0;
        if (used.compare_exchange_weak(at, start + bytes, std::memory_order_relaxed)) return start;
    }
}

void Segment::discard(Offset offset, std::uint64_t bytes) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const auto from = (offset + page - 1) & ~(page - 1), to = (offset + bytes) & ~(page - 1);
    if (from >= to) return;
    // Where the file system can't, the pages stay: memory that nobody reads.
    (void)::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(from), static_cast<off_t>(to - from));
}

Instance* Segment::make_instance(int slot, std::uint32_t incarnation) {
    auto bytes = sizeof(Instance) + sizeof(std::atomic<Offset>) * static_cast<std::uint64_t>(world_size_);
    auto offset = allocate(bytes, 4096);
    if (offset == 0) return nullptr;
    auto* instance = at<Instance>(offset, bytes);
    instance->slot = static_cast<std::uint32_t>(slot);
    instance->incarnation = incarnation;
    return instance;
}

bool Segment::register_instance(Instance* instance) {
    auto& newest = this->newest(static_cast<int>(instance->slot));
    auto seen = newest.load(std::memory_order_acquire);
    do {
        const auto* other = instance_at(seen, static_cast<int>(instance->slot));
        if (other != nullptr && other->incarnation >= instance->incarnation) return false;
        instance->older = seen;
    } while (!newest.compare_exchange_weak(seen, offset_of(instance), std::memory_order_acq_rel));
    return true;
}

Instance* Segment::find_instance(int slot, std::uint32_t incarnation) const {
    auto* i = newest_instance(slot);
    while (i != nullptr && i->incarnation > incarnation) i = older_instance(i);
    return i != nullptr && i->incarnation == incarnation ? i : nullptr;
}

Instance* Segment::instance_at(Offset offset, int slot) const {
    auto bytes = sizeof(Instance) + sizeof(std::atomic<Offset>) * static_cast<std::uint64_t>(world_size_);
    auto* i = at<Instance>(offset, bytes);
    return i != nullptr && i->slot == static_cast<std::uint32_t>(slot) ? i : nullptr;
}

}  // namespace ftcomm::shm
