#include "transport/shm/cells.h"

#include <cstring>

namespace ftcomm::shm {

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

bool Cells::load(Offset at, Bytes* value) const {
    value->clear();
    if (at == 0) return true;
    auto* record = segment_.at<Record>(at);
    if (record == nullptr) return false;
    auto length = record->length;
    if (segment_.at<Record>(at, sizeof(Record) + length) == nullptr) return false;
    const auto* p = reinterpret_cast<const std::byte*>(record + 1);
    value->assign(p, p + length);
    return true;
}

Cells::Result Cells::read(const std::string& key, Bytes* value) {
    value->clear();
    auto* cell = find(key, false);
    if (cell == nullptr) return Result::Value;
    return load(cell->head.load(std::memory_order_acquire), value) ? Result::Value : Result::Lost;
}

Cells::Result Cells::compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, Bytes* value) {
    auto* cell = find(key, true);
    if (cell == nullptr) return Result::Lost;
    auto head = cell->head.load(std::memory_order_acquire);
    Offset fresh = 0;
    for (;;) {
        if (!load(head, value)) return Result::Lost;
        if (*value != expected) return Result::Conflict;
        if (fresh == 0) {
            fresh = segment_.allocate(sizeof(Record) + desired.size(), 64);
            auto* record = segment_.at<Record>(fresh, sizeof(Record) + desired.size());
            if (record == nullptr) return Result::Lost;
            record->length = static_cast<std::uint32_t>(desired.size());
            if (!desired.empty()) std::memcpy(record + 1, desired.data(), desired.size());
        }
        // Records are never reused, so an equal head is the same content: no ABA.
        if (cell->head.compare_exchange_strong(head, fresh, std::memory_order_acq_rel)) {
            *value = desired;
            return Result::Swapped;
        }
    }
}

}  // namespace ftcomm::shm
