// A stream's index file, mapped: the watermarks.
#pragma once

#include <memory>

#include "pairlog/files.h"
#include "pairlog/record.h"

namespace ftcomm::pairlog {

inline constexpr const char* kIndexName = "index";

class IndexFile {
public:
    Status create(int folder, const StreamKey& key);              // opens it if it is there
    Status open(int folder, const StreamKey& key, bool* absent);
    explicit operator bool() const { return file_ != nullptr; }
    Index* operator->() const { return reinterpret_cast<Index*>(file_->base); }
    Status sync() const;   // to stable storage

private:
    std::shared_ptr<Mapping> file_;
};

}  // namespace ftcomm::pairlog
