#include "runtime/file_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/check.h"
#include "runtime/log_runs.h"

namespace ftcomm {

namespace {

constexpr std::uint64_t kShort = 1u << 10;    // nobody wants to see a part of it
constexpr std::uint64_t kStretch = 64u << 10;  // is summed while it is in the cache

pairlog::RecordKind kind_of(const LogKey& key) {
    return key.dst == kResults                        ? pairlog::RecordKind::Result
           : key.dst == kAnswers || key.dst == kHeard ? pairlog::RecordKind::Answer
           : key.dst == kMarks || key.dst == kNotes   ? pairlog::RecordKind::Mark
           : key.dst == kFailures                     ? pairlog::RecordKind::Failure
                                                      : pairlog::RecordKind::Message;
}

std::string mark_name(int slot) { return "rank-" + std::to_string(slot); }
std::string lost_name(int slot) { return "lost-" + std::to_string(slot); }

// Whether the slot's earlier processes have logged in another folder than this one. Every process that has a log leaves its mark in the
// folder; where there is none, that is noted before this process leaves its own, which its replacement will find. Those that
// ended before they had a log are not meant: two such ranks would each take the other's log for lost, though nobody has anything yet.
Status look_for_predecessor(int folder, const FileLogConfig& config, bool* lost) {
    const auto name = lost_name(config.slot);
    struct stat info{};
    // After the host's end the mark may be missing beside streams that were synced.
    const auto streams = "-" + std::to_string(config.slot) + "-";
    bool found = ::fstatat(folder, mark_name(config.slot).c_str(), &info, 0) == 0;
    bool logged = false;  // by anybody: then the store has not seen the job's beginning
    for (const auto& entry : pairlog::list_folder(folder)) {
        found = found || entry.find(streams) == 16;
        logged = logged || entry.find('-') == 16;
    }
    if (!found && (logged || !config.unlogged)) {
        const pairlog::Fd made(::openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
        if (!made || ::fsync(made.get()) != 0 || ::fsync(folder) != 0)
            return Status::error(Code::System, config.files.path + "/" + name + ": " + std::strerror(errno));
    }
    *lost = ::fstatat(folder, name.c_str(), &info, 0) == 0;
    return {};
}

}  // namespace

Status FileLog::open(const FileLogConfig& config, std::unique_ptr<FileLog>* out) {
    std::unique_ptr<FileLog> log(new FileLog(config));
    // Before anything is made in it: the folder of a run that nobody uses may go at any time.
    if (auto s = use_run(config.files.path, config.deadline, config.stop_event, &log->folder_, &log->used_); !s) return s;
    if (const auto& spill = config.files.spill_path; !spill.empty())
        if (auto s = make_parent(spill); !s) return s;
    auto files = config.files;
    files.owner = config.slot;
    if (auto s = pairlog::LogDir::open(files, &log->dir_); !s) return s;
    if (config.again)
        if (auto s = look_for_predecessor(log->folder_.get(), config, &log->lost_); !s) return s;
    // Says to processes that never meet this one (it may have ended before they start) that its streams are here.
    const auto mark = mark_name(config.slot);
    int holder = 0;
    bool marked = false;
    // A predecessor that leaves takes it away.
    for (int attempt = 0; attempt < 8 && !marked && holder == 0; ++attempt)
        marked = log->mark_.take(log->folder_.get(), mark, &holder);
    if (!marked)
        return holder > 0 ? Status::error(Code::StaleEpoch, "process " + std::to_string(holder) + " still is rank " +
                                                                std::to_string(config.slot) +
                                                                " of the job: end it, then start this one again")
                          : Status::error(Code::System, config.files.path + "/" + mark + ": " + std::strerror(errno));
    const auto here = config.hosts[static_cast<std::size_t>(config.slot)];
    const bool elsewhere = std::ranges::any_of(config.hosts, [&](auto host) { return host != 0 && host != here; });
    if (auto s = note_run(log->folder_.get(), {config.keep, elsewhere, config.files.spill_path}); !s) return s;
    if (config.remove_old) remove_old_runs(config.files.path, config.files.spill_path);
    *out = std::move(log);
    return {};
}

pairlog::StreamKey FileLog::file_of(const LogKey& key) const {
    // Behind the ranks: what a rank notes for itself.
    const auto dst = key.dst >= 0 ? key.dst : config_.files.world_size - 1 - key.dst;
    ByteWriter w;
    w.put(key.comm).put(key.part);
    return {key.part == 0 ? key.comm : hash64(w.take()), key.src, dst};
}

pairlog::StreamWriter* FileLog::writer(const LogKey& key, Status* why) {
    if (recent_ != nullptr && recent_key_ == key) return recent_;
    auto& found = writers_[key];
    if (found == nullptr) {
        auto s = pairlog::StreamWriter::open(*dir_, file_of(key), &found);
        if (why != nullptr) *why = std::move(s);
        unused_.erase(key);
    }
    recent_key_ = key;
    return recent_ = found.get();
}

// Asked only: one that was never used is empty, and is not made for that. There may be no room, and a replacement may need none.
pairlog::StreamWriter* FileLog::used_writer(const LogKey& key, Status* why) {
    const bool known = (recent_ != nullptr && recent_key_ == key) || writers_.contains(key);
    if (known || !unused_.contains(key)) {
        bool there = known;
        if (!known)
            if (auto s = pairlog::StreamWriter::exists(*dir_, file_of(key), &there); !s) {
                if (why != nullptr) *why = std::move(s);
                return nullptr;
            }
        if (there) return writer(key, why);
        unused_.insert(key);
    }
    return nullptr;
}

Status FileLog::own_writer(const LogKey& key, pairlog::StreamWriter** out) {
    FT_CHECK(own(key), "slot %d writes to a stream of slot %d", config_.slot, key.src);
    Status s;
    *out = writer(key, &s);
    return s;
}

pairlog::StreamReader* FileLog::reader(const LogKey& key, Status* why) {
    auto& recent = recent_readers_[key.part & 1];  // both parts of a stream are asked for in turn
    if (recent.second != nullptr && recent.first == key) return recent.second;
    auto& found = readers_[key];
    if (found == nullptr) {
        // What a rank notes belongs to it alone: others may look, and hold nothing back.
        const auto role = key.dst >= 0 ? pairlog::StreamReader::Role::Consumer : pairlog::StreamReader::Role::Observer;
        auto s = pairlog::StreamReader::open(*dir_, file_of(key), role, &found);
        if (why != nullptr) *why = std::move(s);
    }
    recent = {key, found.get()};
    return found.get();
}

std::uint64_t FileLog::last(const LogKey& key) {
    if (own(key)) {
        const auto* w = used_writer(key);
        return w != nullptr ? w->last_seq() : 0;
    }
    auto* r = reader(key);
    if (r == nullptr) return 0;
    r->refresh();
    return r->last_seq();
}

std::uint64_t FileLog::first(const LogKey& key) {
    if (own(key)) {
        const auto* w = used_writer(key);
        return w != nullptr ? w->first_seq() : 1;
    }
    auto* r = reader(key);
    return r != nullptr ? r->first_seq() : 1;
}

Status FileLog::state(const LogKey& key) {
    Status s;
    if (own(key)) {
        used_writer(key, &s);
        return s;
    }
    auto* r = reader(key, &s);
    return r != nullptr ? r->error() : s;
}

Status FileLog::append(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::span<const ByteView> parts) {
    pairlog::StreamWriter* w = nullptr;
    auto s = own_writer(key, &w);
    if (!s) return s;
    std::uint64_t bytes = 0;
    for (const auto& part : parts) bytes += part.size();
    if (bytes <= kShort) {
        s = w->append_whole(info_of(key, tag, aux, bytes), parts);
        return s ? make_durable(*w) : s;
    }
    std::byte* to = nullptr;
    if (s = begin(*w, key, tag, aux, bytes, &to); !s) return s;
    for (auto part : parts) w->put(part, into_for(part.size(), key.dst == kResults ? kLongResult : kLongMessage));
    return commit(*w);
}

Status FileLog::make_room(const LogKey& key, std::uint64_t bytes) {
    pairlog::StreamWriter* w = nullptr;
    auto s = own_writer(key, &w);
    return s ? w->make_room(bytes) : s;
}

pairlog::RecordInfo FileLog::info_of(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes) const {
    pairlog::RecordInfo info;
    info.kind = kind_of(key);
    info.tag = tag;
    info.aux = aux;
    info.length = bytes;
    if (info.kind == pairlog::RecordKind::Message && key.src == config_.slot) {  // of this host's half the sender knows
        info.step = position_.iteration;
        info.micro_batch = position_.micro_batch;
    }
    return info;
}

Status FileLog::begin(pairlog::StreamWriter& w, const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes,
                      std::byte** payload) {
    return w.begin(info_of(key, tag, aux, bytes), payload);
}

Status FileLog::append_made(const LogKey& key, std::int64_t tag, std::uint64_t aux, std::uint64_t bytes, const Make& make) {
    pairlog::StreamWriter* w = nullptr;
    auto s = own_writer(key, &w);
    if (!s) return s;
    std::byte* to = nullptr;
    if (s = begin(*w, key, tag, aux, bytes, &to); !s) return s;
    for (std::uint64_t at = 0; at < bytes; at += kStretch) {
        const auto n = std::min(kStretch, bytes - at);
        std::optional<std::uint32_t> sum;
        if (s = make(to + at, at, n, &sum); !s) {
            w->abandon();
            return s;
        }
        w->publish(at + n, sum);
    }
    return commit(*w);
}

Status FileLog::append_shown(const LogKey& key, std::int64_t tag, std::uint64_t aux, ByteView payload, std::uint64_t stretch,
                             const Shown& shown) {
    pairlog::StreamWriter* w = nullptr;
    auto s = own_writer(key, &w);
    if (!s) return s;
    std::byte* to = nullptr;
    if (s = begin(*w, key, tag, aux, payload.size(), &to); !s) return s;
    for (std::uint64_t at = 0; at < payload.size();) {
        const auto n = std::min(stretch, payload.size() - at);
        w->put(payload.subspan(at, n), into_for(n, kLongMessage));
        at += n;
        if (at < payload.size()) shown(at);
    }
    return commit(*w);
}

Status FileLog::commit(pairlog::StreamWriter& w) {
    auto s = w.commit();
    return s ? make_durable(w) : s;
}

// Nothing that follows from a record leaves the process before it is on stable storage (L10).
Status FileLog::make_durable(pairlog::StreamWriter& w) { return dir_->host_durable() ? w.flush() : Status{}; }

Status FileLog::flush() {
    for (auto it = unsynced_.begin(); it != unsynced_.end(); it = unsynced_.erase(it))
        if (auto s = (*it)->flush(); !s) return s;
    return {};
}

Status FileLog::get(const LogKey& key, std::uint64_t seq, bool verify, LogRecord* out) {
    pairlog::RecordInfo info;
    Status s;
    if (own(key)) {
        auto* w = writer(key, &s);
        if (w != nullptr) s = w->find(seq, &info, &out->payload, verify);
    } else {
        auto* r = reader(key, &s);
        if (r != nullptr) s = r->find(seq, &info, &out->payload, verify);
    }
    if (!s) return s;
    out->seq = info.seq;
    out->tag = info.tag;
    out->aux = info.aux;
    out->crc = info.crc;
    out->position = {info.step, info.micro_batch};
    return {};
}

// The writer gives a record up, and the reader says that it needs it no longer: then its memory is used again (L3).
Status FileLog::collect(const LogKey& key, std::uint64_t through) {
    Status s;
    if (own(key)) {
        auto* w = writer(key, &s);
        return w != nullptr && through >= w->first_seq() ? w->collect(std::min(through, w->last_seq())) : s;
    }
    auto* r = reader(key, &s);
    if (r != nullptr && through > r->acknowledged()) r->acknowledge(through);
    return s;
}

Status FileLog::skip(const LogKey& key, std::uint64_t through) {
    pairlog::StreamWriter* w = nullptr;
    auto s = own_writer(key, &w);
    return s ? w->skip(through) : s;
}

bool FileLog::readable(int slot) {
    const auto host = config_.hosts[static_cast<std::size_t>(slot)];
    if (slot == config_.slot) return true;
    if (host != 0) return host == config_.hosts[static_cast<std::size_t>(config_.slot)];
    struct stat info{};
    return ::stat((config_.files.path + "/" + mark_name(slot)).c_str(), &info) == 0;
}

void FileLog::remove_if_last() {
    const std::filesystem::path folder = config_.files.path;
    std::error_code ignored;
    std::filesystem::remove(folder / mark_name(config_.slot), ignored);
    for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
        if (entry.path().filename().string().starts_with("rank-")) return;
    recent_ = nullptr;
    writers_.clear();
    shown_.clear();
    readers_.clear();
    for (auto& recent : recent_readers_) recent = {};
    // Two may come to this point; one of them has the folder.
    const auto mine = removed_name(folder.string());
    std::filesystem::rename(folder, mine, ignored);
    if (!ignored) remove_wholly(mine);
    if (folder.parent_path() == parent_of_runs()) std::filesystem::remove(folder.parent_path(), ignored);  // if it is empty
    if (!config_.files.spill_path.empty()) std::filesystem::remove_all(config_.files.spill_path, ignored);
}

}  // namespace ftcomm
