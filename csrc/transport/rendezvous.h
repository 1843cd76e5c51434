// Lets the ranks of a group find each other through the job's store, before the first op and beside all ops.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/job/peers.h"
#include "transport/ring/schedule.h"
#include "transport/settings.h"
#include "transport/workspace_group.h"

namespace pyruntime {

// The result of one rendezvous of all ranks, after which they can make workspaces together.
struct Gathered {
  int64_t number;                  // the same on all ranks: a group may be closed and used again
  std::vector<std::string> hosts;  // by rank
  std::vector<pid_t> pids;         // on their hosts, by rank
  std::string workspaces;          // their name, which no other rendezvous has
};

class Rendezvous {
 public:
  // Joins the job unless this process already has.
  Rendezvous(const GroupContext& context, c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  // tell() gives the others of the group this rank's value for `topic`; hear() returns that of `peer`. hear()
  // raises, on all ranks, PeerLost if the peer has ended, and CommTimeout if it has not come after `seconds`,
  // with `while_it_lives` after that long without a sign of life. `doing` begins the sentence. Any thread.
  void tell(const std::string& topic, const std::string& value);
  std::string hear(int peer, const std::string& topic, const std::string& doing, double seconds,
                   bool while_it_lives);
  // Every rank's value for `topic`, by rank. Collective.
  std::vector<std::string> exchange(const std::string& topic, const std::string& own);
  // A new number for an exchange beside the ops, the same on all ranks, which all make this call.
  int64_t next_exchange();
  // Returns, on all ranks, the largest of the ranks' values; each call needs a topic of its own.
  std::vector<double> agree(const std::string& topic, const std::vector<double>& own);
  // For a collective of torch's over this group that has failed: see raise_for_missing() in core/job/peers.h.
  [[noreturn]] void raise_for_missing(const std::string& doing, const std::string& cause);

  // Meets all ranks. Collective. Raises ValueError if their settings differ.
  Gathered gather(const GroupSettings& settings);
  // The ranks of this rank's host, under the workspace name of that rendezvous.
  std::unique_ptr<WorkspaceGroup> workspace_group(const Gathered& gathered, const HostLayout& layout) const;

  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const { return process_group_; }

 private:
  void join_job();
  std::string key_of(const std::string& topic, int rank) const;
  Waiting waiting(const std::string& for_what) const;

  const GroupContext& context_;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

}  // namespace pyruntime
