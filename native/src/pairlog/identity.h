// The file "job" of a log's folder: whose it is.
#pragma once

#include <string>

#include "pairlog/log_dir.h"

namespace ftcomm::pairlog {

inline constexpr const char* kIdentityName = "job";

// Writes it if the folder has none; LogCorrupt if it is of another job, world size or version.
Status claim_folder(int folder, const std::string& path, const LogConfig& config);

}  // namespace ftcomm::pairlog
