// Processes and threads of this host: identity of a peer process, its host, whether it lives, and threads
// that must run soon after they wake.
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

// Names the running kernel and the process-id namespace. Two processes can open each other's memory exactly
// if these are equal.
std::string host_identity();
// The host's name, for people.
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

// Asks the scheduler to let this thread run soon after it wakes: a short time slice (Linux 6.12 and later, no
// privilege needed) and, if permitted, a higher priority. For threads that move chunks: they run rarely and
// briefly, and beside a thread that computes, a woken one may wait a whole time slice (some milliseconds)
// while its chunk waits.
void make_this_thread_prompt();

// Does this for all threads of this process that are called `name`: a backend's, which carry the data.
void make_threads_prompt(const std::string& name);

}  // namespace pyruntime
