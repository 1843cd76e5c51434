// Processes and threads of this host: who a peer process is, where it runs, whether it still lives, and which
// threads must run soon after they wake.
#pragma once

#include <string>
#include <sys/types.h>
#include <utility>

namespace pyruntime {

// A file descriptor that closes itself.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Names the running kernel and the process-id namespace: two processes can open each other's memory exactly
// when these are equal.
std::string host_identity();
// What people call this host.
std::string host_name();

// A process of this host, watched through a pidfd: unlike kill(pid, 0) it tells a zombie from a living
// process and is never fooled by a reused process id.
class WatchedProcess {
 public:
  WatchedProcess() = default;
  explicit WatchedProcess(pid_t pid);
  bool gone() const;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  UniqueFd pidfd_;
};

// Threads that move chunks run rarely and briefly, and a chunk waits while they wait for a core: beside a
// thread that computes, a woken thread may otherwise wait a whole time slice (some milliseconds) for its
// turn.
//
// Asks the scheduler to let this thread run soon after it wakes: a short time slice (Linux 6.12 and later, no
// privilege needed) and, where the process may, a higher priority. What is not permitted is left.
void make_this_thread_prompt();

// The same for threads of this process by their name: those of a backend's own that carry the data.
void make_threads_prompt(const std::string& name);

}  // namespace pyruntime
