// The log folders of one job's runs on this host, side by side: they are taken into use, and removed when their users are dead.
#pragma once

#include <filesystem>
#include <string>

#include "base/status.h"
#include "communicator/request.h"
#include "pairlog/files.h"

namespace ftcomm {

// The folder of all runs: this user's alone, for it holds what the ranks say to each other.
Status make_parent(const std::string& path);

// Makes the run's folder at `path` if it is absent. As long as `used` lives, remove_old_runs leaves it alone; nothing may be
// made in it before. Waits for who is just removing it, until `deadline` (0: none) or until stop_fd is readable.
Status use_run(const std::string& path, Time deadline, int stop_fd, pairlog::Fd* folder, pairlog::UseLock* used);

// L9. Beside `path`: the runs that nobody uses, with what they have spilled. Beside `spill_path` (empty: nowhere): what others have begun to
// remove.
void remove_old_runs(const std::string& path, const std::string& spill_path);

// What remove_old_runs has to know of a run that nobody uses.
struct RunNotes {
    bool kept = false;  // its owner will go on with it, or remove it
    // The job has ranks on other hosts: a replacement may come here for an hour after the newest process's start.
    bool elsewhere = false;
    std::string spill;  // the folder of what it has spilled; empty: none
};
Status note_run(int folder, const RunNotes& notes);

// Where the runs are that nobody has given a place: this user's, of all jobs.
std::string parent_of_runs();

// What a run is called from now on that nobody is to find any more: whoever dies before it is removed, another one's remove_old_runs does it.
std::string removed_name(const std::string& run);

// Others may still make, close or remove things in it.
void remove_wholly(const std::filesystem::path& folder);

}  // namespace ftcomm
