// State that a group and its transport share.
#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>
#include <vector>

#include "core/job/job_ranks.h"
#include "core/ledger/traffic.h"
#include "transport/descriptor.h"

namespace pyruntime {

// Counts the forward and backward passes of a group's ops: an even number is a forward pass, an odd one a
// backward pass. A rank that leaves a backward pass by an exception counts fewer ops of it than the others,
// so its next call belongs to another pass than theirs.
struct Passes {
  int32_t count = 0;
  int graph_task = -1;  // autograd's; -1 in a forward pass
  // The pass of an op that this thread begins now.
  int32_t now();
};

// The thread that runs an op of a group; see Inside.
struct Occupied {
  pid_t thread = 0;        // 0: none. Atomic
  bool contended = false;  // another thread tried to begin one meanwhile. Atomic
  int depth = 0;
  Op op = Op::kAllGather;
};

struct GroupContext {
  std::string name;
  int rank;
  int world_size;
  double deadline_seconds;
  TrafficClass traffic_class = TrafficClass::kTp;
  int within_class = 0;  // chunks of a lower place leave first
  CommStats stats = {};
  bool link_is_broken = false;  // an op failed with chunks under way, which the link may still hold
  // The group's ranks by their numbers in the process group, of which it may have only some, and in the job.
  // Empty: the same numbers.
  std::vector<int> process_group_ranks = {};
  std::vector<int> job_ranks = {};
  // If an op of this group fails, the ranks of this process group are out of step.
  std::string process_group = {};
  Occupied inside = {};
  Passes passes = {};
  // Passes that this rank has left by an exception: forward passes of a model with ops in this group, and
  // backward passes with gradients in it. Ranks that have left equally many may go on.
  int32_t failed_passes = 0;

  // The number by which figures and ledgers know a rank.
  int process_group_rank(int of) const {
    return process_group_ranks.empty() ? of : process_group_ranks.at(of);
  }
  int job_rank(int of) const { return job_ranks.empty() ? of : job_ranks.at(of); }
  // The names of this rank and of another in messages: see JobRanks.
  std::string own_name() const { return JobRanks::instance().name(job_rank(rank)); }
  std::string name_of(int peer) const { return JobRanks::instance().name_and_place(job_rank(peer)); }
};

}  // namespace pyruntime
