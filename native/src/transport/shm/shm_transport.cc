#include "transport/shm/shm_transport.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "transport/shm/liveness_word.h"
#include "transport/shm/peer_memory.h"

namespace ftcomm {

using shm::Offset;

ShmTransport::ShmTransport(shm::Segment& segment, shm::Instance& self, ShmEvents& events)
    : segment_(segment), self_(self), events_(events), peers_(static_cast<std::size_t>(segment.world_size())) {}

std::byte* ShmTransport::reserve(int slot, std::uint32_t length) {
    auto& writer = peers_[static_cast<std::size_t>(slot)].writer;
    if (!writer.attached) {
        writer.waiting = true;
        return nullptr;
    }
    if (writer.ring == nullptr && !make_ring(slot, writer)) {
        writer.waiting = true;
        return nullptr;
    }
    auto* p = writer.ring->reserve(length);
    if (p == nullptr) writer.waiting = true;
    return p;
}

void ShmTransport::commit(int slot, const FrameHeader& header) {
    auto& writer = peers_[static_cast<std::size_t>(slot)].writer;
    FT_CHECK(writer.ring != nullptr, "commit to slot %d without reserve", slot);
    auto verdict = FT_POINT("shm.commit");
    if (verdict.action == fault::Action::Cut) cut(verdict.argument);
    if (cut_.has(slot)) {
        writer.ring->abandon();  // lost on the way, as far as anybody can tell
        return;
    }
    auto& box = writer.instance->mailbox;
    const bool watched = writer.found && box.watching.load(std::memory_order_relaxed) != 0;
    if (verdict.action == fault::Action::Corrupt) writer.ring->commit_corrupt(header);
    else if (watched) writer.ring->commit_in_order(header);
    else writer.ring->commit(header);
    if (watched && box.watching.load(std::memory_order_seq_cst) != 0) return;
    writer.found = true;
    leave_word(slot, box);
}

void ShmTransport::leave_word(int slot, shm::Mailbox& box) {
    shm::leave(box.pending, static_cast<int>(self_.slot));
    if (!hold_bells_ || box.sleeper.load(std::memory_order_seq_cst) != shm::kProgress) {
        shm::wake(box);
    } else {
        held_.add(slot);
    }
}

void ShmTransport::watch_words(std::span<const Word> words) {
    const bool all = words.size() <= kWatchedWords;
    if (overlooks() == all) self_.mailbox.overlooks.store(all ? 0 : 1, std::memory_order_seq_cst);
    const auto n = all ? words.size() : 0;
    words_.store(0, std::memory_order_relaxed);
    for (std::size_t i = 0; i < n; ++i) {
        word_[i].at.store(words[i].at, std::memory_order_relaxed);
        word_[i].seen.store(words[i].seen, std::memory_order_relaxed);
    }
    words_.store(n, std::memory_order_release);
    // What has changed before others knew that they have to leave word.
    if (!all && std::ranges::any_of(words, &Word::has_changed)) shm::leave(self_.mailbox.pending, static_cast<int>(self_.slot));
}

// Who is awake looks before it sleeps: it says so first, and looks then (Engine::sleep_as); who changes a word does that first, and looks who is
// asleep then.
void ShmTransport::nudge(int slot) {
    auto* peer = instance_of(slot);
    if (peer == nullptr || cut_.has(slot)) return;
    auto& box = peer->mailbox;
    if (box.sleeper.load(std::memory_order_seq_cst) == shm::kAwake && box.overlooks.load(std::memory_order_seq_cst) == 0) return;
    leave_word(slot, box);
}

void ShmTransport::ring_held() {
    if (!holds_any()) return;
    for (int slot : held_.list()) ring_held(slot);
}

void ShmTransport::ring_held(int slot) {
    if (!held_.has(slot)) return;
    held_.remove(slot);
    auto& box = peers_[static_cast<std::size_t>(slot)].writer.instance->mailbox;
    if (shm::is_left(box.pending, static_cast<int>(self_.slot))) shm::wake(box);
}

void ShmTransport::attach(int slot, std::uint32_t incarnation) {
    auto& writer = peers_[static_cast<std::size_t>(slot)].writer;
    if (writer.attached && writer.incarnation == incarnation) return;
    discard_what_is_over();
    ring_held(slot);  // a predecessor that was voted out may live, and has been told so
    const bool refused = writer.waiting;  // for want of a link, or by one that is gone: its frame is still to be sent
    writer = Writer{};
    writer.attached = true;
    writer.incarnation = incarnation;
    writer.instance = segment_.find_instance(slot, incarnation);
    if (!refused) return;
    writer.waiting = true;
    if (writer.instance != nullptr) shm::post(self_.mailbox, self_.mailbox.writable, slot);  // else look_for_peers() says it
}

shm::Instance* ShmTransport::instance_of(int slot) {
    auto& writer = peers_[static_cast<std::size_t>(slot)].writer;
    if (!writer.attached) return nullptr;
    if (writer.instance == nullptr) writer.instance = segment_.find_instance(slot, writer.incarnation);
    return writer.instance;
}

bool ShmTransport::shares_memory(int slot) {
    const auto* peer = instance_of(slot);
    return peer != nullptr && self_.memory_domain != 0 && peer->memory_domain == self_.memory_domain;
}

Transport::Read ShmTransport::read(int slot, const Remote& remote, std::byte* to, std::size_t bytes) {
    const auto* peer = instance_of(slot);
    if (peer == nullptr || cut_.has(slot) || !remote.is_of(peer->incarnation)) return Read::Over;
    if (FT_POINT("shm.read").action == fault::Action::Corrupt) return Read::Refused;
    const auto* ticket = segment_.at<std::uint64_t>(remote.ticket_at);
    return ticket != nullptr ? shm::read_peer(*peer, remote, *ticket, to, bytes) : Read::Refused;
}

// Half of the segment is for links, cells and tickets: without those nobody could be told that there is no room.
Transport::Window ShmTransport::make_window(std::size_t bytes, Room room) {
    FT_CHECK(bytes > kWindowHead, "a window of %zu bytes", bytes);
    const auto used = segment_.header().used.load(std::memory_order_relaxed);
    if (room == Room::Any && used + bytes > segment_.size() / 2) return {};
    const auto offset = segment_.allocate(bytes, kWindowHead);
    auto* head = segment_.at<shm::WindowHead>(offset, bytes);
    if (head == nullptr || (room == Room::Any && FT_POINT("shm.window").action == fault::Action::Corrupt)) return {};
    head->bytes = bytes;
    head->next = self_.windows.load(std::memory_order_relaxed);
    self_.windows.store(offset, std::memory_order_release);
    return {reinterpret_cast<std::byte*>(head), offset};
}

const std::byte* ShmTransport::look(int slot, std::uint64_t place, std::size_t bytes) {
    if (instance_of(slot) == nullptr || cut_.has(slot) || place % kWindowHead != 0) return nullptr;
    return segment_.at<std::byte>(place, bytes);
}

// As of rings. Somebody who has not heard of the death may look into one still: what is not there any more is not to be taken for zeros,
// so its ticket falls before. Each survivor does it; offsets go down along the chain, whatever is in them.
void ShmTransport::discard_windows(const shm::Instance& dead) {
    auto at = dead.windows.load(std::memory_order_acquire);
    while (auto* head = segment_.at<shm::WindowHead>(at, kWindowHead)) {
        head->ticket.store(0, std::memory_order_seq_cst);
        const auto bytes = head->bytes;
        if (bytes > kSmallWindow && segment_.at<std::byte>(at, bytes) != nullptr)
            segment_.discard(at + kWindowHead, bytes - kWindowHead);
        if (head->next >= at) return;
        at = head->next;
    }
}

// What it has not read, whoever sent it: senders may have died with it. Who still writes there, not having heard, writes for nobody. Replacements
// get rings of their own: without this a job would grow with each death. Headers stay, as links of their chain, along which offsets go down.
void ShmTransport::discard_rings_to(shm::Instance& dead) {
    for (int slot = 0; slot < segment_.world_size(); ++slot) {
        auto at = segment_.inbound(&dead, slot).load(std::memory_order_acquire);
        while (const auto* ring = segment_.at<shm::Ring>(at)) {
            const auto capacity = ring->capacity, older = ring->older;
            if (ring->magic != shm::kRingMagic || !shm::is_ring_capacity(capacity) ||
                segment_.at<shm::Ring>(at, sizeof(shm::Ring) + capacity) == nullptr)
                break;
            segment_.discard(at + sizeof(shm::Ring), capacity);
            if (older >= at) break;
            at = older;
        }
    }
}

// A voted-out process may still be at work on what was sent to it, and others on what it shows: zeros there would be taken for data.
void ShmTransport::discard_what_is_over() {
    std::erase_if(removed_, [this](shm::Instance* one) {
        const bool over = is_over(one->liveness.load(std::memory_order_acquire));
        if (over) {
            discard_windows(*one);
            discard_rings_to(*one);
        }
        return over;
    });
}

void ShmTransport::detach(int slot) {
    auto& peer = peers_[static_cast<std::size_t>(slot)];
    if (!peer.writer.attached) return;
    ring_held(slot);
    for (auto& reader : peer.readers)
        if (reader->incarnation <= peer.writer.incarnation) reader->closed = closed_some_ = true;
    if (auto* instance = instance_of(slot); instance != nullptr) removed_.push_back(instance);
    discard_what_is_over();
    peer.writer = Writer{};
    sweep(peer);
}

// Long ones while at most half of the segment is used: what is given back is memory, not room in it.
bool ShmTransport::make_ring(int slot, Writer& writer) {
    if (instance_of(slot) == nullptr) return false;
    const bool roomy = segment_.header().used.load(std::memory_order_relaxed) <= segment_.size() / 2;
    const auto capacity =
        roomy ? shm::ring_capacity(segment_.world_size()) : shm::ring_capacity(segment_.world_size(), shm::kUsualRing);
    auto offset = segment_.allocate(sizeof(shm::Ring) + capacity, 4096);
    auto* ring = segment_.at<shm::Ring>(offset, sizeof(shm::Ring) + capacity);
    if (ring == nullptr) return false;
    ring->source = self_.slot;
    ring->source_incarnation = self_.incarnation;
    ring->target = static_cast<std::uint32_t>(slot);
    ring->target_incarnation = writer.incarnation;
    ring->capacity = capacity;
    ring->magic = shm::kRingMagic;
    auto& newest = segment_.inbound(writer.instance, static_cast<int>(self_.slot));
    auto seen = newest.load(std::memory_order_acquire);
    do {
        // A removed incarnation that wakes up must not hide its successor's ring.
        const auto* other = segment_.at<shm::Ring>(seen);
        if (other != nullptr && other->source_incarnation >= self_.incarnation) return false;
        ring->older = seen;
    } while (!newest.compare_exchange_weak(seen, offset, std::memory_order_acq_rel));
    writer.ring = std::make_unique<shm::RingWriter>(ring);
    return true;
}

void ShmTransport::find_rings(int slot, Peer& peer) {
    auto newest = segment_.inbound(&self_, slot).load(std::memory_order_acquire);
    if (newest == peer.newest) return;
    std::vector<std::unique_ptr<Reader>> found;
    for (auto at = newest; at != 0 && at != peer.newest && found.size() < 64;) {
        auto* ring = segment_.at<shm::Ring>(at);
        const auto capacity = ring == nullptr ? 0 : ring->capacity;
        if (ring == nullptr || ring->magic != shm::kRingMagic || ring->source != static_cast<std::uint32_t>(slot) ||
            ring->target != self_.slot || ring->target_incarnation != self_.incarnation || !shm::is_ring_capacity(capacity) ||
            segment_.at<shm::Ring>(at, sizeof(shm::Ring) + capacity) == nullptr)
            break;
        found.push_back(
            std::unique_ptr<Reader>(new Reader{slot, ring->source_incarnation, false, shm::RingReader(ring, capacity)}));
        at = ring->older;
    }
    peer.newest = newest;
    if (peer.readers.empty() && !found.empty()) sources_.push_back(slot);
    for (auto it = found.rbegin(); it != found.rend(); ++it) peer.readers.push_back(std::move(*it));
    if (watching_) watch_readers();
}

void ShmTransport::watch(bool on) {
    if (on) {
        if (watching_ || sources_.size() > kWatched) return;
        watching_ = true;
        return watch_readers();
    }
    // The word, too, in which others may have written: nobody would leave any more.
    if (!watching_ && self_.mailbox.watching.load(std::memory_order_relaxed) == 0) return;
    watching_ = false;
    self_.mailbox.watching.store(0, std::memory_order_seq_cst);
    watched_[0].store(nullptr, std::memory_order_release);
    for (int slot : sources_)
        for (const auto& reader : peers_[static_cast<std::size_t>(slot)].readers)
            if (!reader->closed && reader->ring.has_frames()) shm::leave(self_.mailbox.pending, slot);
}

void ShmTransport::watch_readers() {
    watched_readers_.clear();
    for (int slot : sources_)
        for (const auto& reader : peers_[static_cast<std::size_t>(slot)].readers)
            if (!reader->closed) watched_readers_.push_back(reader.get());
    const auto n = watched_readers_.size();
    if (n > kWatched) return watch(false);
    for (std::size_t i = 0; i < n; ++i) watched_[i].store(watched_readers_[i]->ring.ring(), std::memory_order_release);
    watched_[n].store(nullptr, std::memory_order_release);
    self_.mailbox.watching.store(1, std::memory_order_seq_cst);
}

bool ShmTransport::read(int slot, Reader& reader, std::uint64_t& budget) {
    bool took = false, empty = false;
    while (!reader.closed && budget > 0) {
        FrameHeader header;
        ByteView payload;
        auto next = reader.ring.peek(&header, &payload);
        if (next == shm::RingReader::Next::Frame) {
            auto bytes = sizeof header + payload.size();
            budget -= std::min<std::uint64_t>(budget, bytes);
            took = true;
            reader.busy = true;  // a drain from inside must not see the frame again
            if (!cut_.has(slot)) events_.on_frame(slot, reader.incarnation, header, payload);
            reader.busy = false;
            reader.ring.take();
            continue;
        }
        if (next == shm::RingReader::Next::Broken) {
            reader.closed = closed_some_ = true;
            events_.on_broken(slot, reader.incarnation);
        }
        empty = true;
        break;
    }
    if (took && reader.ring.writer_waits()) {
        // To the incarnation that wrote; another one's bit would only be a spurious look.
        if (auto* sender = segment_.find_instance(slot, reader.incarnation))
            shm::post(sender->mailbox, sender->mailbox.writable, static_cast<int>(self_.slot));
    }
    return empty || reader.closed;
}

bool ShmTransport::poll(std::uint64_t budget) {
    FT_CHECK(!reading_, "poll from inside an upcall");
    auto& box = self_.mailbox;
    bool did = false;
    for (int i = 0; i < (segment_.world_size() + 63) / 64; ++i) {
        if (box.pending[i].load(std::memory_order_relaxed) != 0) {
            auto word = box.pending[i].exchange(0, std::memory_order_seq_cst);
            for (; word != 0; word &= word - 1) {
                int slot = i * 64 + std::countr_zero(word);
                if (slot < segment_.world_size()) todo_.add(slot);
            }
            did = true;
        }
    }
    if (watching_)
        for (auto* reader : watched_readers_) {
            if (reader->ring.has_frames()) todo_.add(reader->slot);
            else if (shm::has_frames(*reader->ring.ring())) reader->ring.mend_tail();  // somebody else has written it
        }
    if (!todo_.empty()) {
        did = true;
        reading_ = true;
        for (int slot = 0; slot < segment_.world_size(); ++slot) {
            if (!todo_.has(slot)) continue;
            auto& peer = peers_[static_cast<std::size_t>(slot)];
            find_rings(slot, peer);
            bool empty = true;
            for (std::size_t r = 0; r < peer.readers.size() && empty; ++r) empty = read(slot, *peer.readers[r], budget);
            if (empty) todo_.remove(slot);
            else if (budget == 0)
                // Left over for the next poll, of whichever thread: said in the mailbox, where sleepers look.
                box.pending[slot / 64].fetch_or(std::uint64_t{1} << (slot % 64), std::memory_order_seq_cst);
        }
        reading_ = false;
        if (closed_some_) {
            closed_some_ = false;
            for (auto& peer : peers_) sweep(peer);
        }
    }
    for (int i = 0; i < (segment_.world_size() + 63) / 64; ++i) {
        if (box.writable[i].load(std::memory_order_relaxed) == 0) continue;
        auto word = box.writable[i].exchange(0, std::memory_order_seq_cst);
        for (; word != 0; word &= word - 1) {
            int slot = i * 64 + std::countr_zero(word);
            if (slot >= segment_.world_size()) continue;
            auto& writer = peers_[static_cast<std::size_t>(slot)].writer;
            if (!writer.waiting) continue;
            writer.waiting = false;
            events_.on_writable(slot);
            did = true;
        }
    }
    return did;
}

void ShmTransport::drain(int slot, std::uint32_t incarnation) {
    auto& peer = peers_[static_cast<std::size_t>(slot)];
    find_rings(slot, peer);
    const bool inside = std::exchange(reading_, true);  // of an upcall: a view that came as a frame
    for (std::size_t r = 0; r < peer.readers.size(); ++r) {
        if (peer.readers[r]->incarnation != incarnation || peer.readers[r]->busy) continue;
        std::uint64_t budget = UINT64_MAX;
        read(slot, *peer.readers[r], budget);
    }
    reading_ = inside;
    sweep(peer);
}

void ShmTransport::drain(int slot) {
    const auto& writer = peers_[static_cast<std::size_t>(slot)].writer;
    if (writer.attached) drain(slot, writer.incarnation);
}

void ShmTransport::look_for_peers() {
    for (std::size_t slot = 0; slot < peers_.size(); ++slot) {
        auto& writer = peers_[slot].writer;
        if (!writer.attached || !writer.waiting || writer.ring != nullptr) continue;
        if (instance_of(static_cast<int>(slot)) == nullptr) continue;
        writer.waiting = false;
        events_.on_writable(static_cast<int>(slot));
    }
}

void ShmTransport::sweep(Peer& peer) {
    if (reading_) return;  // a reader may be in use further up the stack
    const auto gone = std::erase_if(peer.readers, [this](const auto& reader) {
        if (reader->closed)
            segment_.discard(segment_.offset_of(reader->ring.ring()) + sizeof(shm::Ring), reader->ring.capacity());
        return reader->closed;
    });
    if (gone == 0) return;
    if (peer.readers.empty()) std::erase(sources_, static_cast<int>(&peer - peers_.data()));
    if (watching_) watch_readers();
}

}  // namespace ftcomm
