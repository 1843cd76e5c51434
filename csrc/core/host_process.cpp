#include "core/host_process.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <poll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pyruntime {

namespace {

constexpr uint64_t kSliceNanoseconds = 100'000;  // the least that Linux takes
constexpr int kNice = -5;

// glibc before 2.41 does not declare it.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = 0;  // SCHED_OTHER
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0;  // of SCHED_OTHER: the time slice
  uint64_t deadline = 0;
  uint64_t period = 0;
};

void make_prompt(pid_t thread) {
#if defined(SYS_sched_setattr)
  errno = 0;
  SchedulingAttributes wanted;
  wanted.nice = getpriority(PRIO_PROCESS, static_cast<id_t>(thread));
  wanted.runtime = kSliceNanoseconds;
  syscall(SYS_sched_setattr, thread, &wanted, 0);
#endif
  setpriority(PRIO_PROCESS, static_cast<id_t>(thread), kNice);
}

}  // namespace

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

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "an unnamed host";
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
  // Kernels before 5.3 have no pidfd: there a zombie counts as alive, and the deadline ends the wait instead.
  return kill(pid_, 0) != 0 && errno == ESRCH;
}

void make_this_thread_prompt() {
  make_prompt(static_cast<pid_t>(syscall(SYS_gettid)));
}

void make_threads_prompt(const std::string& name) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream file(entry.path() / "comm");
    std::string found;
    std::getline(file, found);
    if (found == name) make_prompt(std::atoi(entry.path().filename().c_str()));
  }
}

}  // namespace pyruntime
