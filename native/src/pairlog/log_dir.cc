#include "pairlog/log_dir.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "pairlog/identity.h"
#include "pairlog/layout.h"
#include "pairlog/writer.h"

namespace ftcomm::pairlog {
namespace {

constexpr std::uint64_t kSmallestSegment = 2 * kPage;

}  // namespace

Status LogDir::open(const LogConfig& config, std::unique_ptr<LogDir>* out) {
    if (config.path.empty() || config.job.empty() || config.job.find('\n') != std::string::npos)
        return Status::error(Code::Invalid, "a log needs a folder and the name of its job, in one line");
    std::unique_ptr<LogDir> dir(new LogDir);
    dir->config_ = config;
    dir->config_.segment_bytes = std::max(kSmallestSegment, aligned(config.segment_bytes, kPage));
    dir->boot_ = boot_hash(config.boot_id);
    auto status = open_folder(AT_FDCWD, config.path, true, &dir->folder_);
    if (status) status = claim_folder(dir->folder(), config.path, config);
    if (status && !config.spill_path.empty()) {
        status = open_folder(AT_FDCWD, config.spill_path, true, &dir->spill_folder_);
        if (status) status = claim_folder(dir->spill_folder(), config.spill_path, config);
    }
    if (status) status = dir->pool_.open(dir->folder(), config.path, config.owner, config.limit);
    if (!status) return status;
    dir->resident_ = dir->pool_.bytes();
    *out = std::move(dir);
    return {};
}

LogDir::~LogDir() = default;

Status LogDir::remove(const std::string& path) {
    Fd folder;
    if (auto status = open_folder(AT_FDCWD, path, false, &folder); !status) return status;
    struct stat info{};
    if (::fstatat(folder.get(), kIdentityName, &info, 0) != 0)
        return Status::error(Code::Invalid, path + " is not the folder of a log: it has no file \"" + kIdentityName + "\"");
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) return Status::error(Code::System, "removing the log in " + path + ": " + error.message());
    return {};
}

Status LogDir::prepare(int segments) {
    const auto want = static_cast<std::uint64_t>(std::max(segments, 0)) * config_.segment_bytes;
    for (;;) {
        std::lock_guard lock(mutex_);  // let go after each: zeroing 8 MiB takes a millisecond or two
        if (pool_.bytes() >= want) return {};
        if (resident_ + config_.segment_bytes > config_.limit) return full(config_.segment_bytes, "");
        FreeSegment made;
        auto status = pool_.make(config_.segment_bytes, &made);
        if (status.code == Code::LogFull && pool_.drop_of_the_dead()) continue;
        if (!status) return status.code == Code::LogFull ? no_room(status.message) : status;
        pool_.put(std::move(made));
        resident_ += config_.segment_bytes;
        note_peak();
        peak_ = std::max(peak_, resident_);  // what was asked for is not trimmed at once
    }
}

Status LogDir::keep_back(std::uint64_t bytes) {
    const auto kept = 2 * config_.segment_bytes;
    if (config_.limit < 4 * kept) return {};  // it would be much of it
    while (resident_ - pool_.bytes() + bytes > config_.limit - kept)
        if (const auto status = spill_one(); !status)
            return status.code != Code::LogFull ? status
                                                : full(bytes, size_text(kept) + " are kept for results, answers and checkpoints" +
                                                                  (status.message.empty() ? "" : "; " + status.message));
    return {};
}

Status LogDir::take(std::uint64_t bytes, bool notes, FreeSegment* out) {
    if (!notes)
        if (auto status = keep_back(bytes); !status) return status;
    if (pool_.take(bytes, out)) {
        note_peak();
        return {};
    }
    if (bytes > config_.limit) return full(bytes, "");
    while (resident_ + bytes > config_.limit) {
        if (drop_free()) continue;
        if (const auto status = spill_one(); !status) return status.code == Code::LogFull ? full(bytes, status.message) : status;
    }
    for (;;) {
        auto status = pool_.make(bytes, out);
        if (status) break;
        if (status.code != Code::LogFull) return status;
        if (drop_free_of_any()) continue;
        if (const auto spilled = spill_one(); !spilled)
            return no_room(status.message + (spilled.message.empty() ? "" : "; " + spilled.message));
    }
    resident_ += bytes;
    note_peak();
    return {};
}

bool LogDir::take_if_there_is_room(std::uint64_t bytes, FreeSegment* out) {
    if (!pool_.take(bytes, out)) {
        if (resident_ - pool_.bytes() + bytes + config_.segment_bytes > config_.limit) return false;
        while (resident_ + bytes > config_.limit) {
            const bool dropped = drop_free();
            FT_CHECK(dropped, "no free segment is left, and %llu bytes are not in use",
                     static_cast<unsigned long long>(config_.limit - resident_));
        }
        if (!pool_.make(bytes, out)) return false;
        resident_ += bytes;
    }
    note_peak();
    return true;
}

bool LogDir::drop_free() {
    const auto dropped = pool_.drop_one();
    resident_ -= dropped;
    return dropped > 0;
}

bool LogDir::drop_free_of_any() { return drop_free() || pool_.drop_of_the_dead(); }

void LogDir::give_back(FreeSegment segment) { pool_.put(std::move(segment)); }

// As much may be free as is missing to what was in use at once lately: the next steps will want it again.
void LogDir::trim() {
    note_peak();
    const std::uint64_t keep = std::max(peak_, peak_before_);
    while (resident_ > keep && drop_free()) {}
}

void LogDir::note_peak() {
    const std::uint64_t in_use = resident_ - pool_.bytes();
    if (const auto now = monotonic_ns(); now - window_ > config_.keep_free_ns) {
        peak_before_ = now - window_ > 2 * config_.keep_free_ns ? 0 : peak_;
        peak_ = 0;
        window_ = now;
    }
    peak_ = std::max(peak_, in_use);
}

// The oldest full segment of any stream. The message of the error is empty where there is no spill folder.
Status LogDir::spill_one() {
    if (!spill_folder_) return Status::error(Code::LogFull, "");
    // The segment that a stream writes to goes only if there is no other: it is perhaps hardly begun.
    for (const bool full : {true, false}) {
        StreamWriter* owner = nullptr;
        Segment* oldest = nullptr;
        for (auto* writer : writers_)
            if (auto* segment = writer->coldest(full); segment != nullptr && (oldest == nullptr || segment->age < oldest->age)) {
                owner = writer;
                oldest = segment;
            }
        if (oldest != nullptr) return owner->spill(oldest);
    }
    return Status::error(Code::LogFull, "there is nothing left that could be spilled");
}

Status LogDir::full(std::uint64_t bytes, const std::string& why) const {
    std::string text = "the log of job " + config_.job + " in " + config_.path + " is full: " + size_text(resident_) + " of " +
                       size_text(config_.limit) + " (log_limit) are taken, and " + size_text(bytes) + " more are needed";
    if (spill_folder_) text += "; " + size_text(spilled_) + " are spilled to " + config_.spill_path;
    if (!why.empty()) text += "; " + why;
    return Status::error(Code::LogFull, text + ". Raise log_limit, " + relief());
}

Status LogDir::no_room(const std::string& why) const {
    return Status::error(Code::LogFull, "the log of job " + config_.job + " in " + config_.path + " has " + size_text(resident_) +
                                            ", and there is no room for more; " + why +
                                            ". Make room there, give the log another place (ftrun --pair-log, log_dir), " +
                                            relief());
}

std::string LogDir::relief() const {
    return std::string("commit_checkpoint more often, or give ") +
           (spill_folder_ ? "more room to spill to" : "a folder on disk to spill to");
}

std::uint64_t LogDir::resident() const {
    std::lock_guard lock(mutex_);
    return resident_;
}

std::uint64_t LogDir::spilled() const {
    std::lock_guard lock(mutex_);
    return spilled_;
}

std::uint64_t LogDir::free_bytes() const {
    std::lock_guard lock(mutex_);
    return pool_.bytes();
}

}  // namespace ftcomm::pairlog
