// The free segments of one process: files that are reserved, mapped and faulted in, and belong to no stream. Their pages stay
// warm; a reader that has mapped such a file knows it again by its inode.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pairlog/files.h"

namespace ftcomm::pairlog {

struct FreeSegment {
    std::string name;   // in the pool's folder
    std::shared_ptr<Mapping> file;
};

class Pool {
public:
    // Makes a folder of its own in the log's, and takes over the segments of dead processes of the same owner, up to `limit`.
    // Those of others are for their successors: who starts first would have the memory of all of them.
    Status open(int log, const std::string& path, int owner, std::uint64_t limit);
    ~Pool();

    // One of so many bytes, or up to twice as many, that nobody holds (StreamWriter::hold).
    bool take(std::uint64_t bytes, FreeSegment* out);
    Status make(std::uint64_t bytes, FreeSegment* out);   // a new one, not in the pool yet; LogFull: the file system is full
    void put(FreeSegment segment);
    std::uint64_t drop_one();                             // the one unused for longest, of those not held; its bytes, 0: none
    bool drop_of_the_dead();  // all segments of dead processes, of whichever owner; false: there are none
    std::string new_name();
    int folder() const { return folder_.get(); }
    std::uint64_t bytes() const { return bytes_; }

private:
    std::size_t adopt(const std::string& whose, std::uint64_t limit);

    std::string path_;
    std::string name_;
    int log_ = -1;
    Fd folder_;
    std::unique_ptr<FileLock> lock_;
    std::vector<FreeSegment> free_;  // the one that was used last is the last
    std::uint64_t bytes_ = 0;
    std::uint64_t made_ = 0;
    bool huge_ = true;  // there may be huge pages
};

}  // namespace ftcomm::pairlog
