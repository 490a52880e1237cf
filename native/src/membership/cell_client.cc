#include "membership/cell_client.h"

#include <utility>

namespace ftcomm {

void CellClient::read(const std::string& key, Callback done) {
    const auto id = next_++;
    pending_[id] = Pending{key, {}, {}, false, false, std::move(done)};
    authority_.read(key, id);
}

void CellClient::compare_and_set(const std::string& key, Bytes expected, Bytes desired, Callback done) {
    const auto id = next_++;
    auto& p = pending_[id] = Pending{key, std::move(expected), std::move(desired), true, false, std::move(done)};
    authority_.compare_and_set(key, p.expected, p.desired, id);
}

void CellClient::on_reply(const CellReply& reply) {
    const auto it = pending_.find(reply.request);
    if (it == pending_.end()) return;
    auto p = std::move(it->second);
    pending_.erase(it);
    // M3: a store that was restarted blank accepts anything; whoever believes it splits from those who don't.
    const bool other_store = rules_.m3 && reply.boot != boot_;
    if (reply.result == CellResult::Lost || other_store) {
        p.done(Result::Lost, {});
        return;
    }
    if (!p.is_swap) {
        if (reply.result == CellResult::Value) {
            p.done(Result::Value, reply.value);
        } else {
            read(p.key, std::move(p.done));
        }
        return;
    }
    if (p.rereading) {  // records carry nonces: what is there tells whether ours was written
        if (reply.result != CellResult::Value) {
            const auto id = next_++;
            auto key = p.key;
            pending_[id] = std::move(p);
            authority_.read(key, id);
            return;
        }
        if (reply.value == p.expected) {  // it did not take effect: once more
            compare_and_set(p.key, std::move(p.expected), std::move(p.desired), std::move(p.done));
            return;
        }
        p.done(reply.value == p.desired ? Result::Swapped : Result::Conflict, reply.value);
        return;
    }
    switch (reply.result) {
        case CellResult::Swapped: p.done(Result::Swapped, p.desired); return;
        case CellResult::Conflict: p.done(Result::Conflict, reply.value); return;
        default: {
            p.rereading = true;
            const auto id = next_++;
            auto key = p.key;
            pending_[id] = std::move(p);
            authority_.read(key, id);
            return;
        }
    }
}

}  // namespace ftcomm
