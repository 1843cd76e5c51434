#include <chrono>
#include <fcntl.h>
#include <signal.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "check.h"
#include "core/host_process.h"

namespace {

using pyruntime::UniqueFd;
using pyruntime::WatchedProcess;

bool is_open(int fd) {
  return fcntl(fd, F_GETFD) != -1;
}

TEST(a_descriptor_is_closed_once_by_its_last_owner) {
  int number = -1;
  {
    UniqueFd first(open("/dev/null", O_RDONLY));
    number = first.get();
    EXPECT(first.valid());
    UniqueFd second(std::move(first));
    EXPECT_EQ(second.get(), number);
    UniqueFd third;
    EXPECT(!third.valid());
    third = std::move(second);
    EXPECT_EQ(third.get(), number);
    EXPECT(is_open(number));
  }
  EXPECT(!is_open(number));
}

TEST(a_process_is_gone_when_it_has_been_killed_even_as_a_zombie) {
  const pid_t pid = fork();
  if (pid == 0) {
    for (;;) pause();
  }
  const WatchedProcess process(pid);
  EXPECT_EQ(process.pid(), pid);
  EXPECT(!process.gone());
  kill(pid, SIGKILL);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);  // it has ended and is still a zombie
  EXPECT(process.gone());
  waitpid(pid, nullptr, 0);
  EXPECT(process.gone());
}

TEST(the_own_process_and_no_process_are_never_gone) {
  EXPECT(!WatchedProcess(getpid()).gone());
  EXPECT(!WatchedProcess().gone());
}

TEST(a_forked_process_has_the_same_host_identity) {
  const std::string here = pyruntime::host_identity();
  EXPECT(here.size() > 36);  // a boot id (36 characters) and a namespace
  check::in_ranks(2, [&](int) { EXPECT_EQ(pyruntime::host_identity(), here); });
}

}  // namespace
