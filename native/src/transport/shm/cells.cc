#include "transport/shm/cells.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ftcomm::shm {
namespace {

constexpr int kOffsetBits = 34;  // places of 64 bytes: up to 1 TiB
constexpr std::uint64_t kRecordAlign = 64;
constexpr std::uint64_t kSmallestRecord = 256;

constexpr Offset record_of(std::uint64_t head) { return (head & ((1ull << kOffsetBits) - 1)) * kRecordAlign; }
// The version wraps after 2^30 changes: a reader would have to be stopped for exactly that many.
constexpr std::uint64_t next_head(std::uint64_t head, Offset record) {
    return (((head >> kOffsetBits) + 1) << kOffsetBits) | (record / kRecordAlign);
}

// Record contents are written while others may read them. Word by word, released and acquired: whoever sees a word that was written
// after the record had ceased to be the content sees the head that replaced it, too.
using Word = std::uint64_t;
constexpr std::uint64_t round_up(std::uint64_t bytes) { return (bytes + sizeof(Word) - 1) / sizeof(Word) * sizeof(Word); }

void store_words(std::byte* to, const Bytes& from) {
    for (std::size_t i = 0; i < from.size(); i += sizeof(Word)) {
        Word w = 0;
        std::memcpy(&w, from.data() + i, std::min(sizeof w, from.size() - i));
        std::atomic_ref(*reinterpret_cast<Word*>(to + i)).store(w, std::memory_order_release);
    }
}

void load_words(Bytes* to, std::byte* from) {
    for (std::size_t i = 0; i < to->size(); i += sizeof(Word)) {
        const Word w = std::atomic_ref(*reinterpret_cast<Word*>(from + i)).load(std::memory_order_acquire);
        std::memcpy(to->data() + i, &w, std::min(sizeof w, to->size() - i));
    }
}

}  // namespace

Cells::Cell* Cells::cell_at(Offset offset) const {
    auto* cell = segment_.at<Cell>(offset);
    return cell != nullptr ? segment_.at<Cell>(offset, sizeof(Cell) + cell->key_length) : nullptr;
}

Cells::Cell* Cells::find(const std::string& key, bool make) {
    auto hash = hash64(std::as_bytes(std::span(key.data(), key.size())));
    auto& bucket = segment_.bucket(static_cast<std::uint32_t>(hash % kBuckets));
    auto first = bucket.load(std::memory_order_acquire);
    Cell* fresh = nullptr;
    Offset searched = 0;  // the bucket from here on does not have the key
    for (;;) {
        for (auto at = first; at != searched;) {
            auto* cell = cell_at(at);
            if (cell == nullptr) return nullptr;
            if (cell->hash == hash && cell->key_length == key.size() && std::memcmp(cell + 1, key.data(), key.size()) == 0)
                return cell;
            at = cell->next;
        }
        if (!make) return nullptr;
        searched = first;
        if (fresh == nullptr) {
            auto offset = segment_.allocate(sizeof(Cell) + key.size(), 64);
            fresh = segment_.at<Cell>(offset, sizeof(Cell) + key.size());
            if (fresh == nullptr) return nullptr;
            fresh->hash = hash;
            fresh->key_length = static_cast<std::uint32_t>(key.size());
            std::memcpy(static_cast<void*>(fresh + 1), key.data(), key.size());
        }
        fresh->next = first;
        // Fails when somebody else has put a cell in front, perhaps this key's: search what is new, try again.
        if (bucket.compare_exchange_strong(first, segment_.offset_of(fresh), std::memory_order_acq_rel)) return fresh;
    }
}

// False: damaged. The content may be rewritten while it is read; then the head has moved on, and what was read is dropped.
bool Cells::load(const Cell& cell, std::uint64_t* head, Bytes* value) const {
    *head = cell.head.load(std::memory_order_acquire);
    for (;;) {
        value->clear();
        if (*head == 0) return true;
        const auto at = record_of(*head);
        auto* record = segment_.at<Record>(at);
        if (record == nullptr) return false;
        const auto length = record->length.load(std::memory_order_acquire);
        const bool inside = length <= segment_.size() && segment_.at<Record>(at, sizeof(Record) + round_up(length)) != nullptr;
        if (inside) {
            value->resize(length);
            load_words(value, reinterpret_cast<std::byte*>(record + 1));
        }
        const auto now = cell.head.load(std::memory_order_acquire);
        if (now == *head) return inside;
        *head = now;
    }
}

Offset Cells::write(Mine& mine, const Bytes& value) {
    if (mine.at == 0 || mine.capacity < value.size()) {
        const auto capacity = std::bit_ceil(std::max<std::uint64_t>(value.size(), kSmallestRecord));
        mine = {segment_.allocate(sizeof(Record) + capacity, kRecordAlign),
                capacity};  // the smaller one stays behind, once a size
        if (mine.at == 0 || mine.at >> kOffsetBits >= kRecordAlign) mine.at = 0;
    }
    auto* record = segment_.at<Record>(mine.at, sizeof(Record) + round_up(value.size()));
    if (record == nullptr) return 0;
    record->length.store(value.size(), std::memory_order_release);
    store_words(reinterpret_cast<std::byte*>(record + 1), value);
    return mine.at;
}

Cells::Result Cells::read(const std::string& key, Bytes* value) {
    value->clear();
    auto* cell = find(key, false);
    if (cell == nullptr) return Result::Value;
    std::uint64_t head = 0;
    return load(*cell, &head, value) ? Result::Value : Result::Lost;
}

Cells::Result Cells::compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, Bytes* value) {
    auto* cell = find(key, true);
    if (cell == nullptr) return Result::Lost;
    auto& mine = mine_[key];
    for (;;) {
        std::uint64_t head = 0;
        if (!load(*cell, &head, value)) return Result::Lost;
        if (*value != expected) return Result::Conflict;
        const bool first_is_content = head != 0 && record_of(head) == mine[0].at;
        const auto fresh = write(mine[first_is_content ? 1 : 0], desired);
        if (fresh == 0) return Result::Lost;
        if (cell->head.compare_exchange_strong(head, next_head(head, fresh), std::memory_order_acq_rel)) {
            *value = desired;
            return Result::Swapped;
        }
    }
}

}  // namespace ftcomm::shm
