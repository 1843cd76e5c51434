#include "core/prompt_thread.h"

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

namespace pyruntime {

namespace {

constexpr uint64_t kSliceNanoseconds = 100'000;  // the least that Linux takes
constexpr int kNice = -5;

// glibc has no declaration of it before 2.41.
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
