// Ranks of a group as threads of this process or as processes, and the workspaces by which they meet.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "values.h"

namespace run {

constexpr int kMostRanks = 4;
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kPatience = 20 * kSecond;
constexpr int64_t kDeadline = kSecond / 3;  // where somebody does not come

enum class Kind { kThreads, kProcesses };

// What ranks tell each other on the host; in memory that forked processes share.
struct Board;

class Rank {
 public:
  Rank(Kind kind, int rank, int world_size, Board& board);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  void* stream() const { return stream_.get(); }
  // Of a kernel, so that those of all ranks on this device run at once; 0: as many as there is room for.
  int32_t most_blocks() const;
  // Waits for all ranks; throws where one does not come.
  void barrier() const;

 private:
  friend class Workspaces;
  Kind kind_;
  int rank_, world_size_;
  Board& board_;
  device::Stream stream_;
};

// Of all ranks; made by all at once. They live until the process ends, because a peer may look at them still.
class Workspaces {
 public:
  Workspaces(Rank& rank, const PyruntimeWorkspace& shape);

  PyruntimeGroup group(int slot, int64_t deadline_ns = kPatience) const;
  // By all ranks, when nothing is under way.
  void prepare() const;
  void check_guards() const;

 private:
  Rank& rank_;
  PyruntimeWorkspace shape_;
  int64_t bytes_ = 0;
  std::vector<void*> bases_;
};

// The stream has ended and nothing has failed.
void expect_no_failure(const Rank& rank, const PyruntimeGroup& group);
// Waits for the stream of a rank without a group.
void wait(Rank& rank);
// A wait for `peer` has failed, of this rank or of the one that told it to stop.
PyruntimeFailure expect_failure(const Rank& rank, const PyruntimeGroup& group, int peer);

void nap_ms(long ms);

// A case: a name, and what every rank of it does.
struct Case {
  std::string name;
  int ranks;
  Kind kind;
  std::function<void(Rank&)> body;
};

// Runs a case in a process of its own; "" where it went well, else what was wrong.
std::string outcome(const Case& one);

// Runs `body` in a forked process for at most `seconds`; its return value, or a sentence on how it ended.
std::string in_process(const std::function<std::string()>& body, double seconds);

}  // namespace run
