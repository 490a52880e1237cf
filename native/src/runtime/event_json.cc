#include "runtime/event_json.h"

#include <time.h>

#include "runtime/json.h"

namespace ftcomm {
namespace {

std::int64_t clock_ns(clockid_t clock) {
    timespec t{};
    ::clock_gettime(clock, &t);
    return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

std::string event_json(const EventSource& source, const NodeEvent* event, const std::string& line) {
    Json j;
    j.begin();
    j.key("time").seconds(clock_ns(CLOCK_REALTIME)).key("monotonic_ns").number(clock_ns(CLOCK_MONOTONIC));
    j.key("job").text(source.job).key("rank").number(source.rank).key("incarnation").number(source.incarnation);
    if (event == nullptr) {
        j.key("kind").text("log").key("text").text(line).end();
        return j.str();
    }
    j.key("kind").text(to_string(event->kind));
    if (event->slot >= 0) j.key("slot").number(event->slot).key("slot_incarnation").number(event->incarnation);
    if (event->epoch != 0) j.key("epoch").number(event->epoch);
    if (event->comm != 0) j.key("comm").text(std::to_string(event->comm));  // 64 bits: no JSON number
    if (event->seq != 0) j.key("seq").number(event->seq);
    if (event->attempt != 0) j.key("attempt").number(event->attempt);
    if (event->evidence != Evidence::None) j.key("evidence").text(to_string(event->evidence));
    if (!event->ranks.empty()) j.key("ranks").numbers(event->ranks.list());
    if (event->silence != 0) j.key("silence").seconds(event->silence);
    if (!event->text.empty()) j.key("text").text(event->text);
    j.end();
    return j.str();
}

}  // namespace ftcomm
