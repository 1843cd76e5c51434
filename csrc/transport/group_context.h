// What a group and its transport share.
#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>
#include <vector>

#include "core/job/job_ranks.h"
#include "core/ledger/traffic.h"
#include "transport/descriptor.h"

namespace pyruntime {

// The forward and backward passes that a group's ops are of, counted: an even number is a forward pass, an
// odd one a backward pass. A rank that leaves a backward pass by an exception counts fewer ops of it than the
// others, and what it calls next is then of another pass than what they call.
struct Passes {
  int32_t count = 0;
  int graph_task = -1;  // of autograd, -1 in a forward pass
  // The pass that an op of this thread is of, which begins now.
  int32_t now();
};

// Which thread runs an op of a group; see Inside.
struct Occupied {
  pid_t thread = 0;        // 0: none. Atomic
  bool contended = false;  // another tried to begin one meanwhile. Atomic
  int depth = 0;
  Op op = Op::kAllGather;
};

struct GroupContext {
  std::string name;
  int rank;
  int world_size;
  double deadline_seconds;
  TrafficClass traffic_class = TrafficClass::kTp;
  int within_class = 0;  // chunks of a lower one leave first
  CommStats stats = {};
  bool link_is_broken = false;  // an op failed with chunks under way, which the link may still hold
  // The group's ranks in its process group, of which it may have some only, and in the job. Empty: the same
  // numbers.
  std::vector<int> process_group_ranks = {};
  std::vector<int> job_ranks = {};
  // Whose ranks are out of step where an op of this group fails: that of its process group.
  std::string process_group = {};
  Occupied inside = {};
  Passes passes = {};
  // Forward passes of a model whose ops are of this group, and backward passes whose gradients travel in it,
  // that this rank has left by an exception. Ranks that have left as many may go on.
  int32_t failed_passes = 0;

  // By which figures and ledgers know it.
  int process_group_rank(int of) const {
    return process_group_ranks.empty() ? of : process_group_ranks.at(of);
  }
  int job_rank(int of) const { return job_ranks.empty() ? of : job_ranks.at(of); }
  // What messages call this rank and another: see JobRanks.
  std::string own_name() const { return JobRanks::instance().name(job_rank(rank)); }
  std::string name_of(int peer) const { return JobRanks::instance().name_and_place(job_rank(peer)); }
};

}  // namespace pyruntime
