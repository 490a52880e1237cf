// The head cells of a one-host job: append-only records under compare-and-set heads. No locks, so that a rank that is
// killed or stopped anywhere leaves nothing behind that another would wait for.
#pragma once

#include <string>

#include "base/bytes.h"
#include "transport/shm/segment.h"

namespace ftcomm::shm {

class Cells {
public:
    explicit Cells(Segment& segment) : segment_(segment) {}

    enum class Result { Value, Swapped, Conflict, Lost };  // Lost: the segment is full or damaged
    Result read(const std::string& key, Bytes* value);
    // value: the content afterwards unless Lost.
    Result compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, Bytes* value);

private:
    struct Cell {
        std::atomic<Offset> head;  // newest record; 0: never written
        Offset next;               // in the bucket
        std::uint64_t hash;
        std::uint32_t key_length;
        std::uint32_t unused;
        // then the key
    };
    struct Record {
        std::uint32_t length;
        std::uint32_t unused;
        // then the content
    };

    Cell* find(const std::string& key, bool make);
    Cell* cell_at(Offset offset) const;
    bool load(Offset record, Bytes* value) const;

    Segment& segment_;
};

}  // namespace ftcomm::shm
