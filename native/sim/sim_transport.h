// Simulated links: reliable FIFO per pair of incarnations, finite, delayed, sometimes silent for long.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "sim/queue.h"
#include "sim/random.h"
#include "sim/scenario.h"
#include "transport/transport.h"

namespace ftcomm::sim {

class World;
struct Instance;

struct Frame {
    FrameHeader header;
    std::unique_ptr<std::byte[]> data;
    std::uint32_t capacity = 0;
    Time at = 0;
    std::byte* place = nullptr;  // where a part of it has been put
    const std::byte* lent = nullptr;  // where it lies until it is taken back
};

// From one incarnation to another. Its head frame has one Deliver event at a time.
struct Link {
    int id = 0;
    int from = 0;                  // instance
    int to_slot = 0;
    std::uint32_t to_incarnation = 0;
    std::deque<Frame*> frames;
    struct Lent {
        const std::byte* at;
        std::uint64_t comm;
    };
    std::vector<Lent> unacknowledged;  // has come, and may be sent again all the same, until it is taken back
    Time last_at = 0;
    std::uint64_t bytes = 0;
    bool scheduled = false;
    bool writer_waits = false;
    bool writable_scheduled = false;
};

class SimTransport final : public Transport {
public:
    SimTransport(World& world, Instance& self) : world_(world), self_(self) {}
    std::byte* reserve(int slot, std::uint32_t length) override;
    void commit(int slot, const FrameHeader& header) override;
    bool sends_from(int slot, std::size_t bytes) override { return bytes > 0 && bytes % kWholeBytes == 0 && !is_near(slot); }
    bool send_from(int slot, const FrameHeader& header, const Held& payload) override;
    void take_back(int slot, std::uint64_t comm, bool has_come) override;
    void attach(int slot, std::uint32_t incarnation) override;
    void detach(int slot) override;
    void drain(int slot) override;
    bool shares_memory(int slot) override;
    bool is_near(int slot) override;
    Read read(int slot, const Remote& remote, std::byte* to, std::size_t bytes) override;
    Window make_window(std::size_t bytes, Room room) override;
    const std::byte* look(int slot, std::uint64_t place, std::size_t bytes) override;
    void watch_words(std::span<const Word> words) override;
    void nudge(int slot) override;
    std::uint32_t max_payload() const override;
    bool has_news() const;  // that it notices by itself

private:
    friend class Links;
    struct Target {
        std::uint32_t incarnation = 0;
        bool detached = false;
        Link* link = nullptr;
        Frame* reserved = nullptr;
    };
    Target& target(int slot);
    World& world_;
    Instance& self_;
    std::vector<Target> targets_;
    int windows_ = 0;  // made
    std::vector<Word> words_;
    bool asleep_ = false;  // or there are too many words
};

// All links of the world.
class Links {
public:
    Links(World& world, Random random) : world_(world), random_(random) {}
    Link* find_or_make(const Instance& from, int to_slot, std::uint32_t to_incarnation);
    bool admits(Link& link, std::uint32_t length);  // false: on_writable will follow
    Frame* take(std::uint32_t length);
    void give(Frame* frame) { free_.push_back(frame); }
    void send(Link& link, Frame* frame, Time not_before);
    void deliver(int link);        // the event
    void writable(int link);       // the event
    void cut(int from_slot, int to_slot, Time until);  // an outage or a partition: frames wait, none is lost
    void heal_all();
    void take_back(const Instance& from, int to_slot, std::uint64_t comm, bool has_come);
    bool has_lent(const Instance& from, const Bytes& memory) const;
    void instance_started(const Instance& to);
    // Whether a sign of life that `from` gives now would reach `to` at once: nothing cut, nothing late before it.
    bool clear(const Instance& from, const Instance& to);
    void drop_tails(const Instance& from);           // a host died: what its kernel had not sent is gone
    // Hands over what has arrived (shared memory: everything written). `nested`: from inside an input of `to`.
    void drain(const Instance& from, Instance& to, bool nested);

private:
    void schedule(Link& link, Time at);
    void after_removal(Link& link);
    void look_at_lent(Link& link, const Frame& frame);
    Link* existing(const Instance& from, const Instance& to);
    Time delay();
    Time& cut_until(int from_slot, int to_slot);
    World& world_;
    Random random_;
    std::vector<std::unique_ptr<Link>> links_;
    std::vector<std::unique_ptr<Frame>> all_;
    std::vector<Frame*> free_;
    std::vector<Time> cuts_;
};

}  // namespace ftcomm::sim
