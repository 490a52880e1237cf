// The mapping of a host's segment: allocation, and who is there.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "transport/shm/layout.h"

namespace ftcomm::shm {

class Segment {
public:
    Segment() = default;
    ~Segment() { close(); }
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    // A new sparse memfd: as large as the limits of this process allow; pages cost memory only once touched.
    Status create(std::uint64_t job, std::uint64_t boot, int world_size);
    // Takes over `fd`, also on error. The content must be what create() of this job and boot wrote.
    Status open(int fd, std::uint64_t job, std::uint64_t boot, int world_size);
    void close();
    bool is_open() const { return base_ != nullptr; }
    int fd() const { return fd_; }

    // Zeroed memory at an offset aligned to `align` (a power of two), or 0: the segment is full.
    Offset allocate(std::uint64_t bytes, std::uint64_t align);

    // Gives the memory of whole pages in the range back to the system; their offsets are never handed out again (M9).
    void discard(Offset offset, std::uint64_t bytes);

    // The object at an offset that came out of shared memory; nullptr unless `bytes` lie wholly in the arena.
    template <class T>
    T* at(Offset offset, std::uint64_t bytes = sizeof(T)) const {
        if (offset < kArenaAt || offset % alignof(T) != 0 || bytes > size_ || offset > size_ - bytes) return nullptr;
        return reinterpret_cast<T*>(base_ + offset);
    }
    Offset offset_of(const void* p) const { return static_cast<Offset>(static_cast<const std::byte*>(p) - base_); }

    Header& header() const { return *reinterpret_cast<Header*>(base_); }
    std::atomic<Offset>& newest(int slot) const { return reinterpret_cast<std::atomic<Offset>*>(base_ + kNewestAt)[slot]; }
    std::atomic<Offset>& bucket(std::uint32_t i) const { return reinterpret_cast<std::atomic<Offset>*>(base_ + kBucketsAt)[i]; }
    std::uint64_t size() const { return size_; }
    int world_size() const { return world_size_; }

    // Instances: made, filled in by the caller, then registered.
    Instance* make_instance(int slot, std::uint32_t incarnation);
    // False: a newer incarnation of the slot is there already.
    bool register_instance(Instance* instance);
    Instance* newest_instance(int slot) const { return instance_at(newest(slot).load(std::memory_order_acquire), slot); }
    Instance* older_instance(const Instance* of) const { return instance_at(of->older, static_cast<int>(of->slot)); }
    Instance* find_instance(int slot, std::uint32_t incarnation) const;
    std::atomic<Offset>& inbound(Instance* instance, int slot) const {
        return reinterpret_cast<std::atomic<Offset>*>(instance + 1)[slot];
    }

private:
    Status map();
    Instance* instance_at(Offset offset, int slot) const;

    int fd_ = -1;
    std::byte* base_ = nullptr;
    std::uint64_t size_ = 0;
    int world_size_ = 0;
};

}  // namespace ftcomm::shm
