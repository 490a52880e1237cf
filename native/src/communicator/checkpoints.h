// Under the policy replay: where this rank's program is, written down so that a process that takes its place can go on from there.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/mark.h"

namespace ftcomm {

class Communicator::Checkpoints {
public:
    explicit Checkpoints(Communicator& comm);
    ~Checkpoints();

    // checkpoint_agreement.cc: collective. resume says where the prologue ends, and where this process goes on (empty: right there).
    RequestPtr resume(const std::string& tag, bool noted);
    RequestPtr commit(const std::string& tag);
    std::vector<std::string> tags() const;  // the newest first
    // notes.cc: of this rank alone. resume goes on from a note as from a checkpoint.
    Status note(const std::string& tag);
    std::vector<std::string> notes() const;  // that resume can go on from, the newest first

    void note_use();  // the program has called something on this communicator
    void settle();  // after every input
    void on_tick();
    void on_view();
    void on_offer(int rank, std::uint64_t number);
    void postpone(Time deadline);
    // To give up on an agreement is to give up on its all-gather.
    RequestPtr waited_for(const RequestPtr& request) const;
    bool fail(const RequestPtr& request, Code why);  // false: not of these
    void fail_all(const Status& status);

    // Of the processes before this one: where the log begins to be read anew, and operations that one of them is known to have returned from.
    Status find_resume_point();
    std::uint64_t proven() const;
    Status append_mark(const Mark& mark);  // one that was lost, too (restore.h)

private:
    static constexpr const char* kHearsAgain =
        "A process that goes on from here would hear again what was said there: call resume() and commit_checkpoint() on them, "
        "too, "
        "before this one's, or close() them";
    struct Agreement;
    RequestPtr refuse(std::string text);
    RequestPtr begin_agreement(const std::string& tag, bool commits, bool noted = false);
    Status judge(const Agreement& agreement) const;
    void pass_resume_point(std::uint64_t marks);
    std::string used_elsewhere() const;

    // checkpoints.cc
    ProgramPlace place() const;
    std::optional<Mark> read_mark(std::uint64_t number) const;
    Status damaged_marks() const;
    Status prepare_mark(const std::string& tag, const ProgramPlace& here);
    Status write_mark(const Mark& mark);
    Status at_resume_point(const Mark& mark, const ProgramPlace& here) const;
    Status find_mark(const std::string& tag, const ProgramPlace& here, std::uint64_t* number) const;
    Status go_on_from(std::uint64_t number, const ProgramPlace& here);
    void go_on_at(const ProgramPlace& place, const LoggedPairs::Left& left = {});
    Status pass_checkpoint(const std::string& tag, const ProgramPlace& here, std::uint64_t acknowledged);
    Status give_up_before(std::uint64_t keep);

    // notes.cc
    bool has_noted(const std::string& tag) const;
    std::vector<Note> usable_notes() const;  // the newest first
    bool has_all_before(const Note& note) const;
    Status go_on_from_note(const std::string& tag, const ProgramPlace& here);

    // group_resume.cc
    RankSet others_of_group() const;
    void resume_with_group(RequestPtr request, std::uint64_t number, const ProgramPlace& here);
    void offer_to(int rank);
    void settle_group_resume();
    void end_group_resume(Status status);

    Communicator& comm_;
    Core& core_;
    const CommSpec& spec_;
    const int rank_;
    std::unique_ptr<Agreement> agreement_;  // under way
    std::uint64_t marks_ = 0;  // the program has passed so many, the resume point included
    std::uint64_t used_ = 0, resumed_ = 0;  // while there were so many resume points, and one; this one's number
    std::optional<std::uint64_t> noted_;  // how far it was at the newest note
    struct GroupResume {
        RequestPtr request;  // null: this process has been told to go back further, and is to call again
        std::uint64_t number = 0;
        ProgramPlace here;
        Time deadline = 0;
    };
    std::optional<GroupResume> group_resume_;
    std::map<int, std::uint64_t> offers_;  // of the others of the log group: the mark that each can go on from
};

}  // namespace ftcomm
