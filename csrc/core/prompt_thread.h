// Threads that move chunks run rarely and briefly, and a chunk waits while they wait for a core: beside a
// thread that computes, a woken thread may otherwise wait a whole time slice (some milliseconds) for its
// turn.
#pragma once

#include <string>

namespace pyruntime {

// Asks the scheduler to let this thread run soon after it wakes: a short time slice (Linux 6.12 and later, no
// privilege needed) and, where the process may, a higher priority. What is not permitted is left.
void make_this_thread_prompt();

// The same for threads of this process by their name: those of a backend's own that carry the data.
void make_threads_prompt(const std::string& name);

}  // namespace pyruntime
