#include "communicator/restore.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"

namespace ftcomm {

Communicator::Restore::Restore(Communicator& comm) : comm_(comm), peers_(comm.spec_.members.size()) {}

void Communicator::Restore::on_view() {
    if (comm_.core_.solo || !comm_.dead_end()) return;
    for (int r = 0; r < size(); ++r) {
        if (r == comm_.rank_) continue;
        if (comm_.core_.view.same_group(comm_.slot_of(r), comm_.slot_of(comm_.rank_))) {
            refuse("it is in a log group with rank " + std::to_string(r) + ", and messages inside a group are in no log");
            return;
        }
        const auto& m = comm_.core_.view.members[static_cast<std::size_t>(comm_.slot_of(r))];
        if (!m.alive && m.evidence == Evidence::Left) {
            refuse("rank " + std::to_string(r) + " has left the job, and what it has of this rank's messages with it");
            return;
        }
        auto& p = peer(r);
        if (!m.alive || p.asked == m.incarnation) continue;
        p.asked = m.incarnation;  // one that has come in another's place goes on where that one ended
        std::erase_if(frames_, [&](const Stashed& f) { return f.from == r; });
        ask(r, {});
    }
    if (size() == 1) on_state(comm_.rank_, {});
}

void Communicator::Restore::ask(int rank, const RestoreAsk& ask) {
    ByteWriter w;
    ask.encode(w);
    FT_POINT("restore.ask");
    comm_.core_.sender.send_long(comm_.slot_of(rank), comm_.control(FrameKind::RestoreAsk), comm_.spec_and(w.take()));
}

void Communicator::Restore::on_reply(int rank, ByteView body) {
    if (!comm_.dead_end()) return;
    ByteReader r(body);
    const auto asked = RestoreAsk::decode(r);
    if (asked.records) {
        on_records(rank, asked, r);
        return;
    }
    auto state = RestoreState::decode(r);
    FT_CHECK(r.done(), "an undecodable reply from rank %d about a lost log", rank);
    on_state(rank, std::move(state));
}

void Communicator::Restore::on_state(int rank, RestoreState state) {
    if (state.older) return;  // said to a process before this one
    if (state.lost && !state.none && !comm_.core_.beyond_others) {
        refuse(lost_both(rank));
        return;
    }
    auto& p = peer(rank);
    if (planned_) {  // it was replaced meanwhile, and its log is as it was
        next(rank);
        end();
        return;
    }
    p.state = std::move(state);
    for (int r = 0; r < size(); ++r)
        if (r != comm_.rank_ && !peer(r).state) return;
    planned_ = true;
    if (auto s = plan(); !s) {
        refuse(std::move(s));
        return;
    }
    for (int r = 0; r < size(); ++r) next(r);
    end();
}

// One question at a time to each rank. The rank's own entry has no copies.
void Communicator::Restore::next(int rank) {
    auto& p = peer(rank);
    for (; p.at < p.copies.size(); ++p.at) {
        auto& copy = p.copies[p.at];
        auto have = log().last(copy.to);
        if (have < copy.skip) {
            if (auto s = log().skip(copy.to, copy.skip); !s) {
                refuse(std::move(s));
                return;
            }
            have = copy.skip;
        }
        if (have >= copy.through) continue;
        copy.arrived = 0;
        ask(rank, {true, copy.stream, copy.part, have + 1, 0});
        return;
    }
}

// The last of what is done in an input: it ends this object.
void Communicator::Restore::end() {
    const auto copies = [](const Peer& x) { return x.at < x.copies.size(); };
    if (!comm_.dead_end() || std::any_of(peers_.begin(), peers_.end(), copies)) return;
    if (auto s = finish(); !s) refuse(std::move(s));
    else comm_.on_restored();
}

void Communicator::Restore::on_records(int rank, const RestoreAsk& asked, ByteReader& r) {
    auto& p = peer(rank);
    if (p.at >= p.copies.size()) return;
    auto& copy = p.copies[p.at];
    // Of a process before the one that was asked last.
    if (asked.stream != copy.stream || asked.part != copy.part || asked.seq != log().last(copy.to) + 1 ||
        asked.offset != copy.arrived)
        return;
    const auto pieces = r.count(RestoredPiece::kHead);
    if (pieces == 0) {  // what was late in the process that died comes when it is computed again
        const auto seq = asked.seq + (asked.part == 1 ? base_seq_ : 0);
        if (asked.stream == LostStream::Results && seq <= complete_) {
            refuse("the result of operation #" + std::to_string(seq) + " cannot be read by rank " + std::to_string(rank));
            return;
        }
        copy.through = asked.seq - 1;
    }
    for (std::uint32_t i = 0; i < pieces; ++i) {
        const auto piece = RestoredPiece::decode(r);
        FT_CHECK(r.ok(), "an undecodable record from rank %d", rank);
        if (piece.tag == ResultStream::kUndone && copy.stream == LostStream::Results) copy.through = piece.seq - 1;
        if (piece.seq > copy.through) break;
        if (auto s = put(copy, piece); !s) {
            refuse(std::move(s));
            return;
        }
    }
    if (copy.arrived > 0) ask(rank, {true, copy.stream, copy.part, log().last(copy.to) + 1, copy.arrived});
    else next(rank);
    end();
}

Status Communicator::Restore::put(Copy& copy, const RestoredPiece& piece) {
    if (copy.stream == LostStream::Results && piece.offset == 0) {
        const auto seq = piece.seq + (copy.part == 1 ? base_seq_ : 0);
        if (is_lost(piece.tag, piece.data)) {
            if (seq > complete_) {  // nobody has returned from it: it is done again
                copy.through = piece.seq - 1;
                return {};
            }
            ByteReader head(piece.data);
            const auto shape = Shape::decode(head);
            return Status::error(Code::LogCorrupt, "the result of operation #" + std::to_string(seq) + ", " + shape.text() +
                                                       ", which only this rank was given");
        }
    }
    std::uint32_t crc = 0;
    if (auto s = log().append_piece(copy.to, piece.tag, piece.aux, piece.total, piece.offset, piece.data, &crc); !s) return s;
    copy.arrived = piece.offset + piece.data.size();
    if (copy.arrived < piece.total) return {};
    copy.arrived = 0;
    if (crc != piece.crc)
        return Status::error(Code::LogCorrupt,
                             "record " + std::to_string(piece.seq) + " is damaged in the log that it was fetched from");
    ++records_;
    auto s = log().commit_pieces(copy.to);
    FT_POINT("restore.record");
    return s;
}

// Of what is not the same on all ranks, only that there is nothing for this one can be told from another one's record.
bool Communicator::Restore::is_lost(std::int64_t tag, ByteView head) const {
    if (tag == ResultStream::kFailed) return false;
    switch (static_cast<OpKind>(tag)) {
        case OpKind::Scatter:
        case OpKind::ReduceScatter:
        case OpKind::AllToAll: return true;
        case OpKind::Reduce:
        case OpKind::Gather: {
            ByteReader r(head);
            return Shape::decode(r).root == comm_.rank_;
        }
        default: return false;
    }
}

void Communicator::Restore::keep(int rank, const FrameHeader& header, ByteView payload) {
    frames_.push_back({rank, header, Bytes(payload.begin(), payload.end())});
}

std::string Communicator::Restore::lost_both(int rank) const {
    return "rank " + std::to_string(rank) + " has lost its log, too, and so both copies of the messages between the two";
}

void Communicator::Restore::fail(const Status& status) {
    for (auto& request : take_waiting()) comm_.core_.finish(request, status);
}

void Communicator::Restore::refuse(const std::string& what) { refuse(Status::error(Code::LogCorrupt, what)); }

// Like any log that cannot be read: the process ends, and says why.
void Communicator::Restore::refuse(Status status) {
    if (!comm_.core_.abandoned) return;
    if (status.code == Code::LogCorrupt)
        status.message =
            "the log of rank " + std::to_string(comm_.rank_) + " in communicator " + comm_.spec_.name +
            " is not on this host (another one, or an empty disk), and the other ranks do not have all that is needed "
            "again: " +
            status.message +
            ". Start the replacement where the log is; or start the job again with a fresh log, from the program's own "
            "checkpoints";
    comm_.core_.host.trace("restore.refused");
    comm_.core_.abandoned = std::move(status);
}

// --- the communicator

void Communicator::on_restored() {
    const auto restored = std::move(restore_);
    NodeEvent e;
    e.kind = NodeEvent::Kind::Restored;
    e.comm = spec_.id;
    e.text = std::to_string(restored->progress()) + " records came from other ranks: the log was lost";
    core_.event(std::move(e));
    ring_.reset();
    pairs_.reset();
    read_log();
    on_view();
    for (const auto& f : restored->take_frames()) on_frame(slot_of(f.from), f.header, f.payload);
    for (const auto& request : restored->take_waiting()) core_.finish(request, dead_end());
}

RequestPtr Communicator::ready() {
    auto request = std::make_shared<Request>();
    if (restore_ != nullptr && dead_end()) restore_->wait(request);
    else core_.finish(request, dead_end());
    return request;
}

}  // namespace ftcomm
