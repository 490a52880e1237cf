// What the pair log costs: large messages appended and found through a stream that recycles its memory, against a plain copy
// into one buffer; small ones by the second.
//   bench_pairlog [FOLDER]   (/dev/shm when not given)
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "pairlog/stream.h"

using namespace ftcomm;
using namespace ftcomm::pairlog;

namespace {

// Seconds of one call, the best of several.
template <class F>
double best(int rounds, F f) {
    double seconds = 1e9;
    f();
    for (int i = 0; i < rounds; ++i) {
        const auto start = monotonic_ns();
        f();
        seconds = std::min(seconds, static_cast<double>(monotonic_ns() - start) * 1e-9);
    }
    return seconds;
}

void need(const Status& status) {
    if (status) return;
    std::fprintf(stderr, "bench_pairlog: %s\n", status.message.c_str());
    _exit(1);
}

void large(LogDir& dir, std::size_t size) {
    std::unique_ptr<StreamWriter> writer;
    need(StreamWriter::open(dir, {1, 0, static_cast<std::int32_t>(size >> 10)}, &writer));
    std::vector<std::byte> from(size, std::byte{7}), to(size, std::byte{1});
    RecordInfo info;
    ByteView view;
    const auto show = [&](const char* what, double seconds) {
        std::printf("  %-44s %7.2f GB/s\n", what, static_cast<double>(size) / seconds * 1e-9);
    };
    std::printf("messages of %zu KiB\n", size >> 10);
    show("memcpy", best(20, [&] { std::memcpy(to.data(), from.data(), size); }));
    volatile std::uint32_t sink = 0;
    show("crc32c", best(20, [&] { sink = crc32c(from.data(), size); }));
    const auto append = [&] {
        need(writer->append({}, from));
        need(writer->collect(writer->last_seq() - 1));
    };
    show("append (recycled)", best(20, append));
    show("append and find, not verified", best(20, [&] {
             append();
             need(writer->find(writer->last_seq(), &info, &view, false));
         }));
    show("append and find, verified", best(20, [&] {
             append();
             need(writer->find(writer->last_seq(), &info, &view, true));
         }));
    show("memcpy twice", best(20, [&] {
             std::memcpy(to.data(), from.data(), size);
             std::memcpy(from.data(), to.data(), size);
         }));
    show("append, find, copy out", best(20, [&] {
             append();
             need(writer->find(writer->last_seq(), &info, &view, false));
             std::memcpy(to.data(), view.data(), size);
         }));
}

void small(LogDir& dir, std::size_t size) {
    std::unique_ptr<StreamWriter> writer;
    std::unique_ptr<StreamReader> reader;
    const StreamKey key{2, 0, static_cast<std::int32_t>(size)};
    need(StreamWriter::open(dir, key, &writer));
    need(StreamReader::open(dir, key, StreamReader::Role::Consumer, &reader));
    const std::vector<std::byte> from(size, std::byte{3});
    constexpr int kCount = 200000;
    const double alone = best(5, [&] {
        for (int i = 0; i < kCount; ++i) need(writer->append({}, from));
        reader->refresh();
        reader->acknowledge(reader->last_seq());
        need(writer->collect(writer->last_seq()));
    });
    RecordInfo info;
    ByteView view;
    const double both = best(5, [&] {
        for (int i = 0; i < kCount; ++i) {
            need(writer->append({}, from));
            reader->refresh();
            need(reader->find(reader->last_seq(), &info, &view));
        }
        reader->acknowledge(reader->last_seq());
        need(writer->collect(writer->last_seq()));
    });
    std::printf("messages of %zu bytes: %.2f million appends/s, %.2f million with refresh and verified find\n", size,
                kCount / alone * 1e-6, kCount / both * 1e-6);
}

}  // namespace

int main(int argc, char** argv) {
    LogConfig config;
    config.path = std::string(argc > 1 ? argv[1] : "/dev/shm") + "/ftcomm-bench-pairlog-" + std::to_string(getpid());
    config.job = "bench";
    config.world_size = 1;
    std::unique_ptr<LogDir> dir;
    need(LogDir::open(config, &dir));
    small(*dir, 64);
    small(*dir, 4096);
    large(*dir, std::size_t{1} << 20);
    large(*dir, std::size_t{64} << 20);
    dir.reset();
    need(LogDir::remove(config.path));
}
