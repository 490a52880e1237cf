#include "base/failpoint_words.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "base/failpoint_table.h"

namespace ftcomm::fault {

// Any thread may be here, with any lock held: no allocation, no lock, one write.
void last_words(const Fault& fault) {
    const char* folder = std::getenv("FTCOMM_EVENTS");
    if (folder == nullptr || *folder == '\0') return;
    char path[4096];
    const int length = std::snprintf(path, sizeof path, "%s/events-%d-%d.jsonl", folder, fault.rank, fault.incarnation);
    if (length < 0 || static_cast<std::size_t>(length) >= sizeof path) return;
    const int fd = ::open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0) return;
    std::size_t points = 0;
    const char* at = all_points(&points)[fault.point].name;
    const char* deed = fault.deed == Deed::Kill ? "kill" : fault.deed == Deed::Exit ? "exit" : "stop";
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    char line[256];
    const int bytes =
        std::snprintf(line, sizeof line,
                      "{\"time\":%lld.%09ld,\"rank\":%d,\"incarnation\":%d,\"event\":\"fault\",\"at\":\"%s\",\"do\":\"%s\"}\n",
                      static_cast<long long>(now.tv_sec), now.tv_nsec, fault.rank, fault.incarnation, at, deed);
    if (bytes > 0 && ::write(fd, line, static_cast<std::size_t>(bytes)) < 0) {
        // Nobody is left to be told.
    }
    ::close(fd);
}

}  // namespace ftcomm::fault
