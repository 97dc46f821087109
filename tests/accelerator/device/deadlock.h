// Finds out that communicators cannot go on, and why.
//
// Each process writes where it stands into a file when one of its operations makes no progress, and reads the files of the
// others. An operation waits for the one before it on its communicator, for its partner, and, where that is not launched
// yet, for what the partner's host or stream stands at. A cycle of such waits is a deadlock, whatever the timing.
#pragma once
#include <string>

namespace pretend {
// Begins to look, where it has not begun. `rank` is that in the world, `folder` is shared by all processes.
void watch_for_deadlocks(int rank, const std::string& folder, double patience);
std::string state_of_this_process(int rank);  // for people
}  // namespace pretend
