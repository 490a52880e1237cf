#include "base/status.h"

namespace ftcomm {

const char* to_string(Code code) {
    switch (code) {
        case Code::Ok: return "ok";
        case Code::PeerFailure: return "peer failure";
        case Code::Revoked: return "revoked";
        case Code::StaleEpoch: return "stale epoch";
        case Code::NoAuthority: return "no authority";
        case Code::Timeout: return "timeout";
        case Code::Mismatch: return "mismatch";
        case Code::Invalid: return "invalid argument";
        case Code::Interrupted: return "interrupted";
        case Code::Closed: return "closed";
        case Code::System: return "system error";
        case Code::Unsupported: return "unsupported";
        case Code::Truncated: return "truncated";
        case Code::Cancelled: return "cancelled";
        case Code::Internal: return "internal error";
        case Code::LogFull: return "log full";
        case Code::LogCorrupt: return "log corrupt";
        case Code::ReplayDiverged: return "replay diverged";
    }
    return "unknown";
}

const char* to_string(Evidence evidence) {
    switch (evidence) {
        case Evidence::None: return "none";
        case Evidence::RobustFutex: return "robust-futex";
        case Evidence::Pidfd: return "pidfd";
        case Evidence::Agent: return "agent";
        case Evidence::Reborn: return "reborn";
        case Evidence::Heartbeat: return "heartbeat";
        case Evidence::Reset: return "reset";
        case Evidence::Left: return "left";
        case Evidence::Group: return "group";
        case Evidence::GaveUp: return "gave-up";
    }
    return "unknown";
}

}  // namespace ftcomm
