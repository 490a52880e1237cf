// Transport over the rings of one host's segment.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/shm/mailbox.h"
#include "transport/shm/ring.h"
#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace ftcomm {

class ShmEvents {
public:
    virtual ~ShmEvents() = default;
    virtual void on_frame(int slot, std::uint32_t incarnation, const FrameHeader& header, ByteView payload) = 0;
    virtual void on_writable(int slot) = 0;
    // The ring holds what no correct sender writes: it is not read any more, which is silence.
    virtual void on_broken(int slot, std::uint32_t incarnation) = 0;
};

class ShmTransport final : public Transport {
public:
    ShmTransport(shm::Segment& segment, shm::Instance& self, ShmEvents& events);

    std::byte* reserve(int slot, std::uint32_t length) override;
    void commit(int slot, const FrameHeader& header) override;
    void attach(int slot, std::uint32_t incarnation) override;
    void detach(int slot) override;
    bool shares_memory(int slot) override;
    Read read(int slot, const Remote& remote, std::byte* to, std::size_t bytes) override;
    Window make_window(std::size_t bytes, Room room) override;
    const std::byte* look(int slot, std::uint64_t place, std::size_t bytes) override;
    void watch_words(std::span<const Word> words) override;
    void nudge(int slot) override;
    std::uint32_t max_payload() const override { return shm::max_payload(segment_.world_size()); }

    // Hands up what has arrived, at most about `budget` bytes. True: it did something, or there is more.
    bool poll(std::uint64_t budget);
    // Whether poll() would do something, or there is news. From any thread.
    bool has_mail() const { return has_news() || shm::has_mail(self_.mailbox, segment_.world_size()) || any_has_frames(); }
    // Whether a word that is watched has changed. From any thread: one that reads while another one changes what is watched may be wrong once, and
    // has to look again.
    bool has_news() const {
        const auto n = words_.load(std::memory_order_acquire);
        for (std::size_t i = 0; i < n; ++i) {
            const Word word{word_[i].at.load(std::memory_order_relaxed), word_[i].seen.load(std::memory_order_relaxed)};
            if (word.has_changed()) return true;
        }
        return false;
    }
    // There may be news of which it says nothing: after word was left (poll() did something) there is.
    bool overlooks() const { return self_.mailbox.overlooks.load(std::memory_order_relaxed) != 0; }
    // Between the two calls poll() and has_mail() look at the rings themselves, and most senders leave no word. Nobody may sleep then
    // until word is left (not with many peers: then it stays off). What nobody has read when it ends counts as word left.
    void watch(bool on);
    bool watches() const { return watching_ && !watched_readers_.empty(); }
    // Everything that this incarnation has written (M10: before its death is believed).
    void drain(int slot, std::uint32_t incarnation);
    void drain(int slot) override;
    // Peers that were attached before they had registered: look again.
    void look_for_peers();
    // Peers whose threads are all out of the library get their frames without being woken: they are likely to come for them at once, and
    // it costs each side as much as several operations. Whoever has held bells back has to ring them (ring_held) before it
    // sleeps or goes; those who have looked meanwhile are not rung.
    void hold_bells(bool held) { hold_bells_ = held; }
    bool holds_any() const { return !held_.empty(); }
    void ring_held();
    // Fault injection: from now on silence in both directions (but windows that are looked into already stay in sight).
    void cut(int slot) { cut_.add(slot); }

private:
    struct Writer {
        bool attached = false;
        bool waiting = false;      // reserve() said no
        bool found = false;        // word of the ring itself has been left
        std::uint32_t incarnation = 0;
        shm::Instance* instance = nullptr;
        std::unique_ptr<shm::RingWriter> ring;
    };
    struct Reader {
        int slot;
        std::uint32_t incarnation;
        bool closed = false;
        shm::RingReader ring;
        bool busy = false;  // its frame is being handed up
    };
    struct Peer {
        Writer writer;
        shm::Offset newest = 0;                        // newest inbound ring that is known
        std::vector<std::unique_ptr<Reader>> readers;  // by age
    };

    shm::Instance* instance_of(int slot);  // of the attached incarnation; nullptr: none, or not registered yet
    bool make_ring(int slot, Writer& writer);
    void find_rings(int slot, Peer& peer);
    void ring_held(int slot);
    // True: the ring is empty (or closed).
    bool read(int slot, Reader& reader, std::uint64_t& budget);
    void sweep(Peer& peer);
    void watch_readers();
    bool any_has_frames() const {
        for (const auto& ring : watched_) {
            const auto* r = ring.load(std::memory_order_acquire);
            if (r == nullptr) return false;
            if (shm::has_frames(*r)) return true;
        }
        return false;
    }
    static constexpr std::size_t kWatched = 8;  // rings, at most: each look costs a line for each
    void leave_word(int slot, shm::Mailbox& box);
    struct Watched {
        std::atomic<const std::atomic<std::uint64_t>*> at{nullptr};
        std::atomic<std::uint64_t> seen{0};
    };
    static constexpr std::size_t kWatchedWords = 16;
    void discard_windows(const shm::Instance& dead);
    void discard_rings_to(shm::Instance& dead);
    void discard_what_is_over();  // of those who have died, at once or since they were voted out

    shm::Segment& segment_;
    shm::Instance& self_;
    ShmEvents& events_;
    std::vector<Peer> peers_;
    RankSet todo_;      // sources whose rings may still hold frames
    RankSet cut_;
    std::vector<shm::Instance*> removed_;  // and not over then
    bool reading_ = false;
    bool closed_some_ = false;
    bool hold_bells_ = false;
    // Of all readers, while they are watched; then null. Rings stay mapped: whoever looks without the lock sees one that is not read any more
    // at worst.
    std::array<std::atomic<const shm::Ring*>, kWatched + 1> watched_{};
    std::array<Watched, kWatchedWords> word_;
    std::atomic<std::size_t> words_{0};
    std::vector<Reader*> watched_readers_;  // the same
    std::vector<int> sources_;  // slots with readers
    bool watching_ = false;
    RankSet held_;  // those who have to be rung
};

}  // namespace ftcomm
