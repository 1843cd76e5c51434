#include "cpu/host_process.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pyruntime::cpu {

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) close(fd_);
}

std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  std::getline(file, boot_id);
  TORCH_CHECK(!boot_id.empty(),
              "Cannot read /proc/sys/kernel/random/boot_id, which tells whether two ranks share a host; "
              "mount /proc in this container.");
  char pid_namespace[64] = {};
  const ssize_t length = readlink("/proc/self/ns/pid", pid_namespace, sizeof(pid_namespace) - 1);
  return boot_id + " " + (length > 0 ? std::string(pid_namespace, length) : "pid:[unknown]");
}

WatchedProcess::WatchedProcess(pid_t pid) : pid_(pid) {
#if defined(SYS_pidfd_open)
  pidfd_ = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#endif
}

bool WatchedProcess::gone() const {
  if (pid_ == 0 || pid_ == getpid()) return false;
  if (pidfd_.valid()) {
    pollfd descriptor{pidfd_.get(), POLLIN, 0};
    return poll(&descriptor, 1, 0) == 1;
  }
  // Kernels before 5.3 have no pidfd: a zombie counts as alive there, and the deadline ends the wait instead.
  return kill(pid_, 0) != 0 && errno == ESRCH;
}

}  // namespace pyruntime::cpu
