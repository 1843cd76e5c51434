#include "ranks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>

namespace run {

namespace {

constexpr double kCaseSeconds = 180;
constexpr double kBarrierSeconds = 60;
constexpr int kWords = 400;  // of a message
constexpr const char* kAlone = "another rank did not come to a barrier";

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Memory that processes forked later share.
template <class T>
T& shared_memory() {
  void* made = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) fail("mmap() failed");
  return *new (made) T();
}

std::string said(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

void keep(char (&words)[kWords], const std::string& message) {
  std::snprintf(words, kWords, "%s", message.c_str());
}

}  // namespace

struct Board {
  std::atomic<int> came{0}, failed{0};
  device::Handle handles[kMostRanks];
  void* addresses[kMostRanks] = {};
  char words[kMostRanks][kWords] = {};
};

void nap_ms(long ms) {
  const timespec time{ms / 1000, ms % 1000 * 1'000'000};
  nanosleep(&time, nullptr);
}

std::string in_process(const std::function<std::string()>& body, double seconds) {
  struct Answer {
    char words[kWords] = {};
  };
  auto& answer = shared_memory<Answer>();
  std::fflush(nullptr);
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    keep(answer.words, body());
    std::fflush(nullptr);
    _exit(0);
  }
  if (child < 0) fail("fork() failed");
  const double end = now() + seconds;
  int status = 0;
  bool killed = false;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (now() > end) {
      kill(child, SIGKILL);
      killed = true;
    }
    nap_ms(1);
  }
  std::string words = answer.words;
  munmap(&answer, sizeof(answer));
  if (killed) return "took longer than " + std::to_string(static_cast<int>(seconds)) + " s";
  if (WIFSIGNALED(status)) return "was ended by signal " + std::to_string(WTERMSIG(status));
  if (status != 0) return "ended with exit code " + std::to_string(WEXITSTATUS(status));
  return words;
}

std::string outcome(const Case& one) {
  return in_process(
      [&]() -> std::string {
        auto& board = shared_memory<Board>();
        const auto run_rank = [&](int rank) {
          const std::string words = said([&] {
            device::use(rank % device::count());
            Rank member(one.kind, rank, one.ranks, board);
            one.body(member);
            member.barrier();
          });
          if (!words.empty()) board.failed = 1;  // nobody waits for this rank any more
          return words;
        };
        std::vector<std::thread> ranks;
        for (int rank = 0; rank < one.ranks; ++rank) {
          // A thread that waits for a process has not called HIP, and no more do the processes forked here.
          ranks.emplace_back([&, rank] {
            keep(board.words[rank], one.kind == Kind::kThreads
                                        ? run_rank(rank)
                                        : in_process([&] { return run_rank(rank); }, kCaseSeconds));
          });
        }
        for (std::thread& rank : ranks) rank.join();
        // Who waited for a rank that failed says less than that rank.
        std::string told;
        for (int rank = 0; rank < one.ranks; ++rank) {
          const std::string words = board.words[rank];
          if (words.empty() || (!told.empty() && words == kAlone)) continue;
          if (!told.empty() && told.find(kAlone) == std::string::npos) continue;
          told = (one.ranks > 1 ? "rank " + std::to_string(rank) + ": " : "") + words;
        }
        return told;
      },
      kCaseSeconds);
}

Rank::Rank(Kind kind, int rank, int world_size, Board& board)
    : kind_(kind), rank_(rank), world_size_(world_size), board_(board) {}

int32_t Rank::most_blocks() const {
  const int sharing = (world_size_ + device::count() - 1) / device::count();
  return sharing == 1 ? 0 : std::max(1, pyruntime_multiprocessors() / sharing);
}

void Rank::barrier() const {
  // Counted up for ever: barrier i is over when i times as many came as there are ranks.
  const int mine = board_.came.fetch_add(1), all = (mine / world_size_ + 1) * world_size_;
  const double end = now() + kBarrierSeconds;
  while (board_.came.load() < all) {
    require(now() < end && board_.failed.load() == 0, kAlone);
    nap_ms(1);
  }
}

Workspaces::Workspaces(Rank& rank, const PyruntimeWorkspace& shape)
    : rank_(rank), shape_(shape), bytes_(pyruntime_workspace_bytes(&shape)) {
  if (bytes_ < 0) fail(pyruntime_error());
  device::Handle handle;
  auto* whole = static_cast<unsigned char*>(device::allocate_shared(bytes_ + 2 * kGuardBytes, handle));
  Guarded::fill(whole, bytes_);
  const std::vector<unsigned char> nothing(bytes_, kPoison);
  device::copy(whole + kGuardBytes, nothing.data(), nothing.size());
  rank.board_.handles[rank.rank_] = handle;
  rank.board_.addresses[rank.rank_] = whole;
  rank.barrier();
  for (int peer = 0; peer < rank.world_size_; ++peer) {
    const bool here = peer == rank.rank_ || rank.kind_ == Kind::kThreads;
    void* seen = here ? rank.board_.addresses[peer] : device::open_shared(rank.board_.handles[peer]);
    bases_.push_back(static_cast<unsigned char*>(seen) + kGuardBytes);
  }
  prepare();
}

PyruntimeGroup Workspaces::group(int slot, int64_t deadline_ns) const {
  return {shape_, rank_.rank_, slot, deadline_ns, bases_.data(), /*pieces=*/0, /*rings=*/0, nullptr};
}

void Workspaces::prepare() const {
  rank_.barrier();
  ok(pyruntime_prepare_workspace(&shape_, bases_[rank_.rank_], rank_.stream()));
  const PyruntimeGroup alone = group(0);
  expect_no_failure(rank_, alone);  // waits for the stream
  rank_.barrier();
}

void Workspaces::check_guards() const {
  Guarded::check(static_cast<unsigned char*>(bases_[rank_.rank_]) - kGuardBytes, bytes_);
}

namespace {

PyruntimeFailure failure_of(const Rank& rank, const PyruntimeGroup& group) {
  PyruntimeFailure failure{};
  ok(pyruntime_failure(&group, &failure, rank.stream()));
  return failure;
}

std::string description(const PyruntimeFailure& failure) {
  char text[256];
  ok(pyruntime_describe_failure(&failure, text, sizeof(text)));
  return text;
}

}  // namespace

void expect_no_failure(const Rank& rank, const PyruntimeGroup& group) {
  const PyruntimeFailure failure = failure_of(rank, group);
  require(failure.state == PYRUNTIME_NO_FAILURE, description(failure));
}

// A record of failures can be asked for, and a group of one rank has one.
void wait(Rank& rank) {
  const PyruntimeWorkspace shape{1, 1, 0};
  device::Handle unused;
  void* base = device::allocate_shared(pyruntime_workspace_bytes(&shape), unused);
  ok(pyruntime_prepare_workspace(&shape, base, rank.stream()));
  expect_no_failure(rank, {shape, 0, 0, kPatience, &base, 0, 0, nullptr});
}

PyruntimeFailure expect_failure(const Rank& rank, const PyruntimeGroup& group, int peer) {
  const PyruntimeFailure failure = failure_of(rank, group);
  require(failure.state == PYRUNTIME_FAILED,
          "nothing failed, though rank " + std::to_string(peer) + " did not come");
  require(failure.peer == peer, description(failure) + " Expected: a wait for rank " + std::to_string(peer));
  return failure;
}

}  // namespace run
