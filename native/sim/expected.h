// What a long run must have seen at least once: a transition that never happens is a transition that is not tested.
#pragma once

namespace ftcomm::sim {

inline constexpr const char* kExpected[] = {
    "inject crash",
    "inject crash with host",
    "inject stop",
    "inject stop in the middle of a burst",
    "inject cut-link",
    "inject partition",
    "inject reset",
    "inject authority-slow",
    "inject authority-unknown",
    "inject authority unknown outcome",
    "inject authority-lost",
    "inject authority-blank",
    "inject pause",
    "inject fault during a recovery",
    "inject replacement",
    "inject join completed",
    "inject leave and exit",
    "inject exit of a voted-out rank",
    "authority conflict",
    "authority swap",
    "event suspected",
    "event view",
    "event removed",
    "event frozen",
    "event decided",
    "event repaired",
    "event failed",
    "event joined",
    "event stale",
    "event authority_lost",
    "event join_waiting",
};

}  // namespace ftcomm::sim
