// Who a peer process is, where it runs, and whether it still lives.
#pragma once

#include <string>
#include <sys/types.h>
#include <utility>

namespace pyruntime::cpu {

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

}  // namespace pyruntime::cpu
