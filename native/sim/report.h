// What a run says: counters that survive a crash of the run, the last events, and a violation.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "channel/frame.h"
#include "communicator/node.h"

namespace ftcomm::sim {

// Named counters in memory shared with the parent process: an aborted child loses none. One writer each.
class Counters {
public:
    static constexpr int kSlots = 1024;
    struct Cell {
        char name[88];
        std::uint64_t count;
    };
    void attach(Cell* cells) { cells_ = cells; }
    void add(const char* name, std::uint64_t n = 1);
    static void merge(const Cell* cells, std::map<std::string, std::uint64_t>& into);

private:
    Cell* cells_ = nullptr;
};

struct Violation {
    std::string invariant;  // U B L V Q ...
    Time at = 0;
    std::string what;
    bool found() const { return !invariant.empty(); }
};

// The last events, kept as plain records and put into words only when asked for. With `live` each is printed at once.
class Trace {
public:
    explicit Trace(bool live) : live_(live) { records_.resize(kKept); }
    void frame(Time at, const char* what, int from, std::uint32_t from_inc, int to, std::uint32_t to_inc, const FrameHeader& h);
    void text(Time at, const char* format, ...) __attribute__((format(printf, 3, 4)));
    std::string last(int n) const;
    void print_last(int n) const;  // from a signal handler: to stderr

private:
    static constexpr std::size_t kKept = 512;
    struct Record {
        Time at = 0;
        const char* what = nullptr;  // frames; null: text
        int from = 0, to = 0;
        std::uint32_t from_inc = 0, to_inc = 0;
        FrameHeader header;
        char text[160];
    };
    static std::string words(const Record& r);
    void added();
    bool live_;
    std::vector<Record> records_;
    std::uint64_t next_ = 0;
};

const char* to_string(FrameKind kind);

}  // namespace ftcomm::sim
