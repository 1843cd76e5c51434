#include "check.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace check {

namespace {

struct Test {
  const char* name;
  void (*body)();
};

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

constexpr int kMostPrinted = 20;  // of a test
std::atomic<int> failures{0};

void run(const char* name, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    fail(name, 0, std::string("uncaught exception: ") + error.what());
  }
}

std::string describe(int status) {
  if (WIFSIGNALED(status)) return "was killed by signal " + std::to_string(WTERMSIG(status));
  return "ended with exit code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

void fail(const char* file, int line, const std::string& message) {
  const int before = failures.fetch_add(1);
  if (before < kMostPrinted) std::fprintf(stderr, "%s:%d: %s\n", file, line, message.c_str());
  if (before == kMostPrinted) std::fprintf(stderr, "further failures of this test are not printed\n");
}

void throws(const char* file, int line, const char* what, const std::string& words,
            const std::function<void()>& run) {
  try {
    run();
  } catch (const std::exception& error) {
    const std::string message = error.what();
    if (message.find(words) == std::string::npos) {
      fail(file, line,
           std::string(what) + " threw \"" + message + "\", which does not say \"" + words + "\"");
    }
    return;
  }
  fail(file, line, std::string(what) + " threw nothing, expected an error that says \"" + words + "\"");
}

void in_ranks(int ranks, const std::function<void(int)>& body, double seconds) {
  std::vector<pid_t> running;
  const pid_t parent = getpid();
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      failures = 0;
      const std::string name = "rank " + std::to_string(rank);
      run(name.c_str(), [&] { body(rank); });
      std::fflush(nullptr);
      _exit(failures == 0 ? 0 : 1);
    }
    running.push_back(pid);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    while (waitpid(running[rank], &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > end) kill(running[rank], SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (status != 0) fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + " " + describe(status));
  }
}

}  // namespace check

int main() {
  int failed = 0;
  for (const auto& test : check::tests()) {
    check::failures = 0;
    check::run(test.name, test.body);
    std::fprintf(stderr, "%s %s\n", check::failures == 0 ? "ok    " : "FAILED", test.name);
    failed += check::failures != 0;
  }
  std::fprintf(stderr, "%zu tests, %d failed\n", check::tests().size(), failed);
  // A program that tests nothing has been built wrongly.
  return failed == 0 && !check::tests().empty() ? 0 : 1;
}
