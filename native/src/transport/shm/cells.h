// The head cells of a one-host job. No locks, so that a rank that is killed or stopped anywhere leaves nothing behind that
// another would wait for; and no growth with the number of decisions, so that a job may agree at every step for weeks.
#pragma once

#include <map>
#include <string>

#include "base/bytes.h"
#include "transport/shm/segment.h"

namespace ftcomm::shm {

// A cell's head names the record that is its content, with a version that goes up with each change. Records belong to the
// writer that made them (one Cells object): it alone writes there, and only into a record that is not the content; so it needs
// two for each cell. Whoever reads a record looks at the head again afterwards: unchanged, version included, means that it was
// the content all the while and nobody wrote to it. A removed rank that wakes up in the middle of a write (M9) only hits a record
// of its own that nobody ever was or will be pointed to.
class Cells {
public:
    explicit Cells(Segment& segment) : segment_(segment) {}

    enum class Result { Value, Swapped, Conflict, Lost };  // Lost: the segment is full or damaged
    Result read(const std::string& key, Bytes* value);
    // value: the content afterwards unless Lost.
    Result compare_and_set(const std::string& key, const Bytes& expected, const Bytes& desired, Bytes* value);

private:
    struct Cell {
        std::atomic<std::uint64_t> head;  // version << 34 | offset of the newest record / 64; 0: never written
        Offset next;                      // in the bucket
        std::uint64_t hash;
        std::uint32_t key_length;
        std::uint32_t unused;
        // then the key
    };
    struct Record {
        std::atomic<std::uint64_t> length;
        // then the content, in words
    };
    struct Mine {
        Offset at = 0;
        std::uint64_t capacity = 0;
    };

    Cell* find(const std::string& key, bool make);
    Cell* cell_at(Offset offset) const;
    bool load(const Cell& cell, std::uint64_t* head, Bytes* value) const;
    Offset write(Mine& mine, const Bytes& value);

    Segment& segment_;
    std::map<std::string, Mine[2]> mine_;
};

}  // namespace ftcomm::shm
