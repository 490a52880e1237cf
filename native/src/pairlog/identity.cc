#include "pairlog/identity.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <sstream>

#include "base/random.h"
#include "pairlog/files.h"
#include "pairlog/layout.h"

namespace ftcomm::pairlog {
namespace {

std::string text_for(const LogConfig& c) {
    return "ftcomm pair log\nversion " + std::to_string(kVersion) + "\nworld_size " + std::to_string(c.world_size) + "\njob " +
           c.job + (c.scope == "all" ? "" : "\nlog " + c.scope) + "\n";
}

std::string line(const std::string& text, const std::string& key) {
    std::istringstream in(text);
    for (std::string one; std::getline(in, one);)
        if (one.starts_with(key + " ")) return one.substr(key.size() + 1);
    return "";
}

}  // namespace

Status claim_folder(int folder, const std::string& path, const LogConfig& config) {
    const std::string want = text_for(config);
    std::string found;
    if (!read_file(folder, kIdentityName, &found)) {
        char name[48];
        std::snprintf(name, sizeof name, "job-%016" PRIx64, os_random64());
        Fd fd(::openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
        if (!fd) return system_error("writing into the log's folder " + path);
        auto status = write_all(fd.get(), want.data(), want.size());
        if (!status)
            status =
                std::move(status).within("the log's folder " + path + " (give the log one with room: ftrun --pair-log, log_dir)");
        ::fsync(fd.get());
        // By link, not rename: of several ranks that come at once the first one's stays.
        if (status && ::linkat(folder, name, folder, kIdentityName, 0) != 0 && errno != EEXIST)
            status = system_error("naming the log's folder " + path);
        ::unlinkat(folder, name, 0);
        if (!status) return status;
        if (!read_file(folder, kIdentityName, &found)) return system_error("reading " + path + "/" + kIdentityName);
    }
    if (found == want) return {};
    const auto refuse = [&](const std::string& why) { return Status::error(Code::LogCorrupt, "the log in " + path + " " + why); };
    const std::string other = line(found, "job"), version = line(found, "version"), size = line(found, "world_size");
    if (!found.starts_with("ftcomm pair log\n") || version.empty())
        return refuse("has a damaged file \"job\": if no job needs it, remove the folder");
    if (version != std::to_string(kVersion))
        return refuse("has version " + version + " of the format, this ftcomm has " + std::to_string(kVersion) +
                      ": remove the folder, or go on with the ftcomm that wrote it");
    const std::string instead = ": give it another folder, or remove that one";
    if (other != config.job) return refuse("is of job \"" + other + "\", this is job \"" + config.job + "\"" + instead);
    if (size != std::to_string(config.world_size))
        return refuse("is of a job with " + size + " ranks, this one has " + std::to_string(config.world_size) + instead);
    const std::string scope = line(found, "log");
    return refuse("has other messages in it: log is \"" + (scope.empty() ? "all" : scope) + "\" there, \"" + config.scope +
                  "\" here" + instead);
}

}  // namespace ftcomm::pairlog
