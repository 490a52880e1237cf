// A log in a folder of the test's own, contents that can be told apart, children that die.
#pragma once

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <string>

#include "base/failpoint.h"
#include "base/random.h"
#include "pairlog/stream.h"
#include "tests/unit.h"

namespace ftcomm::pairlog {

using Role = StreamReader::Role;
inline constexpr StreamKey kKey{0xab, 3, 5};
inline constexpr std::uint64_t kSmall = 64u << 10;   // segments of the tests

struct Folder {
    std::string path;
    explicit Folder(const char* parent = "/dev/shm") {
        path = std::string(access(parent, W_OK) == 0 ? parent : "/tmp") + "/ftcomm-pairlog-XXXXXX";
        if (mkdtemp(path.data()) == nullptr) path.clear();
    }
    ~Folder() {
        std::error_code ignored;
        if (!path.empty()) std::filesystem::remove_all(path, ignored);
    }
    LogConfig config() const {
        LogConfig c;
        c.path = path + "/log";
        c.job = "test";
        c.world_size = 8;
        c.segment_bytes = kSmall;
        return c;
    }
    // Which spills to a folder beside it what is more than so many segments.
    LogConfig spilling(std::uint64_t segments, std::uint64_t bytes = kSmall) const {
        auto c = config();
        c.segment_bytes = bytes;
        c.limit = segments * bytes;
        c.spill_path = path + "/spill";
        return c;
    }
    std::string stream(const StreamKey& key = kKey) const { return path + "/log/" + name_of(key); }
    std::string segment(std::uint64_t ordinal) const { return stream() + "/" + segment_name(ordinal); }
};

// By inode, those of so many bytes and more: segments, not what is beside them.
inline std::set<ino_t> files_in(const std::string& folder, std::uint64_t least) {
    std::set<ino_t> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
        struct stat info{};
        if (stat(entry.path().c_str(), &info) == 0 && static_cast<std::uint64_t>(info.st_size) >= least)
            files.insert(info.st_ino);
    }
    return files;
}

// The same bytes for the same number and length.
inline Bytes content(std::uint64_t seq, std::size_t length, std::uint64_t salt = 0) {
    Bytes bytes(length);
    Random random(seq * 1000003 + length + salt);
    for (std::size_t i = 0; i < length; i += 8) {
        const auto word = random();
        std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, length - i));
    }
    return bytes;
}

inline bool same(ByteView a, ByteView b) { return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin()); }

inline std::unique_ptr<LogDir> open_log(const LogConfig& config) {
    std::unique_ptr<LogDir> dir;
    const auto status = LogDir::open(config, &dir);
    if (!status) unit::failed(__FILE__, __LINE__, status.message);
    REQUIRE(dir != nullptr);
    return dir;
}

inline std::unique_ptr<StreamWriter> open_writer(LogDir& dir, const StreamKey& key = kKey) {
    std::unique_ptr<StreamWriter> writer;
    const auto status = StreamWriter::open(dir, key, &writer);
    if (!status) unit::failed(__FILE__, __LINE__, status.message);
    REQUIRE(writer != nullptr);
    return writer;
}

inline std::unique_ptr<StreamReader> open_reader(LogDir& dir, Role role, const StreamKey& key = kKey) {
    std::unique_ptr<StreamReader> reader;
    const auto status = StreamReader::open(dir, key, role, &reader);
    if (!status) unit::failed(__FILE__, __LINE__, status.message);
    REQUIRE(reader != nullptr);
    return reader;
}

inline Status add(StreamWriter& writer, std::size_t length) {
    RecordInfo info;
    info.tag = static_cast<std::int64_t>(length);
    info.aux = writer.last_seq() + 1;
    return writer.append(info, content(writer.last_seq() + 1, length));
}

// Record seq is there with the content that add() gave it.
template <class Stream>
bool holds(Stream& stream, std::uint64_t seq) {
    RecordInfo info;
    ByteView payload;
    const auto status = stream.find(seq, &info, &payload);
    if (!status) unit::failed(__FILE__, __LINE__, status.message);
    return status.ok() && info.seq == seq && info.aux == seq && static_cast<std::size_t>(info.tag) == payload.size() &&
           same(payload, content(seq, payload.size()));
}

template <class Stream>
bool holds_all(Stream& stream) {
    for (auto seq = stream.first_seq(); seq <= stream.last_seq(); ++seq)
        if (!holds(stream, seq)) return false;
    return true;
}

// Runs body in a child with these faults; the wait status, exit 99 if the body returned.
template <class F>
int child_with(const std::string& faults, F body) {
    const pid_t child = fork();
    if (child == 0) {
        // Not REQUIRE's exceptions: they would run the parent's tests on.
        try {
            if (fault::configure(faults, 0, 0).ok()) body();
        } catch (...) { _exit(98); }
        _exit(99);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
}
inline bool killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

inline bool contains(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return true;
    unit::failed(__FILE__, __LINE__, "\"" + part + "\" is not in \"" + text + "\"");
    return false;
}

// Flips one bit of a file.
inline void flip(const std::string& path, std::uint64_t offset) {
    FILE* file = std::fopen(path.c_str(), "r+");
    REQUIRE(file != nullptr);
    std::fseek(file, static_cast<long>(offset), SEEK_SET);
    const int byte = std::fgetc(file);
    std::fseek(file, static_cast<long>(offset), SEEK_SET);
    std::fputc(byte ^ 4, file);
    std::fclose(file);
}

}  // namespace ftcomm::pairlog
