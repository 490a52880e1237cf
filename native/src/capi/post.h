// Calls as the node takes them.
#pragma once

#include "capi/handle.h"

namespace ftcomm::capi {

// Nanoseconds; 0 for what is no positive number of seconds: "the default".
Time seconds_or_default(double seconds);

// FT_OK, or the error of a call that has no meaning.
int check_op(const ft_op* op);
OpDesc described(const ft_op& op, int size);

// One input to the node, with the engine locked.
template <class F>
int with_node(ft_job* job, F f) {
    return guarded([&] {
        if (int rc = check_running(job); rc != FT_OK) return rc;
        auto& engine = job->job->engine();
        Engine::Hold hold(engine);
        if (int rc = check_node(job); rc != FT_OK) return rc;
        return f(engine.node());
    });
}

}  // namespace ftcomm::capi
