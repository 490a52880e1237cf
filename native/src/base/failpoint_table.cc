#include "base/failpoint_table.h"

#include <iterator>

namespace ftcomm::fault {

// Every failpoint of the project, in the order in which a run meets them. Names are never reused for another place.
static constexpr PointInfo kPoints[] = {
    {"step", "A training step begins (FT's step hook); step:N is the beginning of step N."},

    {"rendezvous.publish", "This rank is about to publish its address blob."},
    {"rendezvous.gather", "This rank has published its address and is about to read the others'."},
    {"start.link", "This rank has all addresses and is about to link to the others."},
    {"handshake.hello", "A tcp link is open and its hello is about to be sent."},
    {"handshake.proof", "The peer's hello has arrived and the proof of the job's secret is about to be sent."},
    {"handshake.done", "The handshake of a tcp link succeeded; no frame has been sent on it yet."},
    {"rendezvous.ready", "This rank has linked to all others and is about to say so; they wait for its word."},
    {"comm.create", "A communicator is about to be registered at this rank."},

    {"collective.part",
     "A part of a large collective has been added, copied or passed on, by whichever algorithm carries it "
     "(as `ring.rs.hop`, `ring.ag.hop`, `pull.reduce`, `pull.final`, `stage.reduce`, `stage.final`, `group.sum`, "
     "`group.fetch`, `direct.receive`)."},
    {"ring.enter", "A ring operation starts: its Enter frame is about to be sent to the upstream neighbour."},
    {"ring.rs.first", "This rank is about to send the first reduce-scatter piece of a segment, its own data."},
    {"ring.rs.hop", "A reduce-scatter piece has been reduced with this rank's data and sent on."},
    {"ring.rs.owner", "The owner of a segment has reduced the last contribution; the value is not final yet."},
    {"ring.ag.hop", "A final segment has been received and is about to be passed on."},
    {"ring.ag.first", "A holder of a final segment (broadcast, all-gather, repair) is about to hand it round."},
    {"ring.ag.final", "The last segment of the all-gather has been received and passed on; the fence has not begun."},
    {"pull.enter", "An operation by reading starts: this rank is about to tell the others where its buffers are."},
    {"pull.reduce", "This rank has reduced one of its segments out of all ranks' memory; nobody has been told."},
    {"pull.ready", "This rank has told the others that more of its segments are final, or has sent them."},
    {"pull.final", "A final segment has been read out of its owner's memory, or has come from there."},
    {"stage.enter",
     "An operation by windows of shared memory starts: the first chunk is in this rank's, and the others are about to be told."},
    {"stage.input", "A piece of this rank's input is in its window."},
    {"stage.reduce", "This rank has reduced its piece of a chunk into its window; nobody has been told."},
    {"stage.step", "This rank has said that it is through with a step of an operation by windows."},
    {"stage.final", "A final piece has been copied out of its owner's window."},
    {"group.enter",
     "An all-reduce over several hosts starts: this rank is about to tell the others its group and where its buffers are."},
    {"group.sum", "This rank has added up a segment over its group and is about to send the sum to the segment's owner."},
    {"group.owner", "The owner has added the sums of all groups for a segment; the final is not sent yet."},
    {"group.final", "A group's delegate has received a final; its fellows do not know."},
    {"group.ready", "This rank has told its fellows that more segments are final here."},
    {"group.fetch", "A final segment has been read out of a fellow's memory."},
    {"fence.before", "All data of the operation is here; the fence is about to start."},
    {"fence.round",
     "A frame of the fence has been sent: of one of its rounds, or the word to the rank that answers all, or its answer to one."},
    {"fence.after", "The fence is complete; the operation is about to be reported as done."},
    {"flat.send", "A small operation (all-reduce, reduce, broadcast and so on) has sent its whole input to one peer."},
    {"flat.post", "This rank shows what it puts into a small operation to the others of its host; nobody has been woken for it."},
    {"flat.receive", "A peer's whole input for a small operation has arrived, or has been found where it is shown."},
    {"flat.reduce", "All inputs of a small sum are here and are about to be added."},
    {"flat.done", "A small operation has its result, and is about to be reported as done."},
    {"direct.enter", "A gather, scatter or all-to-all starts: its Enter frame has been sent to one peer."},
    {"direct.send", "A piece of a gather, scatter or all-to-all has been sent to one peer."},
    {"direct.show", "A peer has been told where its part of a gather, scatter or all-to-all lies in this rank's memory."},
    {"direct.read", "A piece of a gather, scatter or all-to-all has been read in another rank's memory."},
    {"direct.receive", "A piece of a gather, scatter or all-to-all has arrived from one peer."},

    {"vote.freeze", "This rank has just frozen a communicator: it is deaf to the attempt, and nobody has been told."},
    {"vote.send", "A frozen member is about to send its vote to the leader."},
    {"vote.plan", "The leader has all votes and is about to make the plan of the repair."},
    {"decide.before", "The leader is about to record its decision with the authority."},
    {"decide.after", "The authority holds the decision; nobody else has been told."},
    {"decide.announce", "The leader has sent the decision to one member."},
    {"decide.apply", "This rank has the recorded decision and is about to apply it."},
    {"repair.start", "The decision is applied; this rank is about to rerun what the plan gives it."},
    {"repair.done", "The repaired operation has its result; it is about to be reported as done."},

    {"spread.pass_on", "This rank has passed a decision or a result on to one of those that are to have it through this rank."},
    {"agree.vote", "This rank is about to send its vote for an agree or a shrink, with those that have come to it."},
    {"agree.before", "The leader of an agree has all votes and is about to record the value."},
    {"agree.after", "The value of an agree is recorded; nobody else has been told."},
    {"shrink.before", "The leader of a shrink is about to record the survivors."},
    {"shrink.after", "The survivors of a shrink are recorded; the new communicator does not exist yet."},

    {"join.mapped", "A replacement has the shared memory of its host, and the others cannot see it there yet."},
    {"join.make", "A replacement that is alone on its host is about to make a new segment of shared memory."},
    {"join.request", "A replacement is about to ask the job to let it in."},
    {"join.admit", "A survivor at its join point is about to send its vote on the replacements that wait."},
    {"join.before", "The leader of a join point is about to record who is admitted."},
    {"join.after", "The admission is recorded and this rank has the new view; its communicators have not moved yet."},
    {"join.transfer.source",
     "A survivor is about to send a piece of the training state to a replacement (corrupt: a bit of it is flipped)."},
    {"join.transfer.joiner", "A replacement has received a piece of the training state."},
    {"leave.send", "This rank is about to tell the others that it leaves as planned."},

    {"p2p.eager", "A small message has been sent with its data."},
    {"p2p.rts", "The announcement of a large message has been sent."},
    {"p2p.cts", "A matching receive was found for a large message; the go-ahead has been sent."},
    {"p2p.data.send", "A piece of a large message has been sent."},
    {"p2p.data", "A piece of a large message, or the rest of a small one, has arrived."},
    {"p2p.read", "A piece of a large message has been read out of its sender's memory."},
    {"p2p.received", "The sender of a large message has been told that all of it has been read; its receiver's caller has not."},

    {"share.put", "Replay: a final is in its owner's log, in the result that is being written there; nobody has been told."},
    {"share.read", "Replay: a final has been read out of its owner's log."},
    {"result.before", "Replay: an operation's data is complete and its result is about to be logged; the fence has not begun."},
    {"result.after", "Replay: the result is in this rank's log; nobody else has been told."},
    {"replay.serve",
     "Replay: an operation that an earlier process of this rank has completed is about to be served from the log."},
    {"replay.live", "Replay: all that was in the log has been served; the first operation that is not is about to start."},
    {"channel.send.before", "Replay: a message is about to be put into its log."},
    {"channel.shown", "Replay: a part of a large message is in its log, and the receiver on this host has been told."},
    {"channel.send.logged", "Replay: a message is in its log; the receiver has not been told."},
    {"channel.send.marked", "Replay: the receiver has been told how far the log goes."},
    {"channel.piece", "Replay: a piece of a logged message has been sent to another host."},
    {"unlogged.back", "Replay, log groups: the receiver of a message is back; it is about to be sent."},
    {"unlogged.receive", "Replay, log groups: a message that is in no log has met its receive."},
    {"unlogged.resume",
     "Replay, log groups: resume is about to tell another one of its group from which checkpoint it can go on."},
    {"late.queued", "Replay, log_mode async: a message is kept to be logged later; it has not been sent."},
    {"late.write", "Replay, log_mode async: a message that was sent is about to be written to the log, or a piece of it."},
    {"channel.arrived", "Replay: a message from another host has arrived whole; no receive has it yet."},
    {"channel.receive", "Replay: a logged message is in the receiver's buffer; the receive has not returned."},
    {"channel.answer.before", "Replay: a receive from ANY has found its message; which one is about to be logged."},
    {"channel.answer.after", "Replay: which message a receive from ANY gets is in the log; the receive has not returned."},

    {"checkpoint.resume", "Replay: the end of what every process does again is about to be marked in the log."},
    {"checkpoint.mark.before", "Replay: all ranks have agreed on a checkpoint; this rank is about to mark it in its log."},
    {"note.before", "Replay: this rank is about to note its place in its log, by itself."},
    {"note.after", "Replay: its place is noted."},
    {"checkpoint.mark.after", "Replay: the checkpoint is marked in this rank's log; nothing has been given up."},
    {"checkpoint.collect", "Replay: what comes before the checkpoint before the last is about to be given up."},

    {"restore.ask", "Replay: a replacement whose log is lost is about to ask another rank what that has of it."},
    {"restore.reply", "Replay: this rank is about to answer one that has lost its log."},
    {"restore.record", "Replay: a record of a lost log has come back from another rank and is in the new log."},
    {"restore.done", "Replay: all that was needed of a lost log is in the new one; that this is so is about to be noted there."},

    {"view.before", "This rank is about to record a new view of the job (who is alive) with the authority."},
    {"view.after", "The authority holds the new view, this rank's or another's; this rank has told nobody."},
    {"log.roll.before", "A segment of the pair log is ready; it is about to get its name in its stream's folder."},
    {"log.roll.after", "A stream of the pair log has a new segment; nothing is in it."},
    {"log.payload.before", "A record of the pair log is begun; nothing of its payload is there."},
    {"log.payload.after",
     "A record's payload is in the pair log (corrupt: a bit of it is flipped); its header says that it is open."},
    {"log.header.before", "The header that makes a record of the pair log a committed one is about to be written."},
    {"log.header.after", "A record of the pair log is whole; this process has not counted it yet."},
    {"log.watermark.before", "A record of the pair log is whole; readers are about to be told."},
    {"log.watermark.after", "A record of the pair log is committed and readers can see it."},
    {"log.spill.before", "A segment of the pair log is about to be copied to the spill folder."},
    {"log.spill.after", "A segment of the pair log is in the spill folder; the one in memory is still there."},
    {"log.collect.before", "Records of the pair log are about to be given up."},
    {"log.collect.after", "Records of the pair log are given up and their segments recycled."},
    {"log.ack", "A consumer of the pair log is about to say that it no longer looks at a record."},

    {"tcp.send", "A frame is about to be written to a tcp socket."},
    {"tcp.receive", "A whole frame has been read from a tcp socket and is about to be handed up."},
    {"shm.read", "A peer's memory is about to be read (corrupt: as if the kernel refused it)."},
    {"shm.window", "Memory for an operation by windows has been taken from the host's segment (corrupt: as if there were none)."},
    {"shm.commit", "A frame is in the shared-memory ring; its commit word is about to be written."},
};

const PointInfo* all_points(std::size_t* count) {
    *count = std::size(kPoints);
    return kPoints;
}

int find_point(std::string_view name) {
    for (std::size_t i = 0; i < std::size(kPoints); ++i)
        if (name == kPoints[i].name) return static_cast<int>(i);
    return -1;
}

}  // namespace ftcomm::fault
