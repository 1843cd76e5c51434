// How the ranks of a group find each other, through the job's store: before the first op and beside all ops.
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

// One rendezvous of all ranks, after which they can make workspaces together.
struct Gathered {
  int64_t number;                  // the same on all ranks: a group may be closed and used again
  std::vector<std::string> hosts;  // by rank
  std::string workspaces;          // their name, that of no other rendezvous
};

class Rendezvous {
 public:
  // Joins the job where this process has not yet.
  Rendezvous(const GroupContext& context, c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  // What this rank says about `topic` to others of the group, and what `peer` has said. hear() raises, on all
  // ranks, PeerLost where the peer has ended and CommTimeout where it does not come within `seconds`, or with
  // `while_it_lives` where it has shown no sign of life for so long. `doing` begins the sentence. Any thread.
  void tell(const std::string& topic, const std::string& value);
  std::string hear(int peer, const std::string& topic, const std::string& doing, double seconds,
                   bool while_it_lives);
  // What every rank puts under `topic`, by rank. Collective.
  std::vector<std::string> exchange(const std::string& topic, const std::string& own);
  // A number that no exchange beside the ops has had: the same on all ranks, which call it alike.
  int64_t next_exchange();
  // Gives the largest of the ranks' values to all of them; each call under a topic of its own.
  std::vector<double> agree(const std::string& topic, const std::vector<double>& own);
  // For a collective of torch's over this group that has failed: see raise_for_missing() in core/job/peers.h.
  [[noreturn]] void raise_for_missing(const std::string& doing, const std::string& cause);

  // Collective. Raises ValueError where the ranks settled different things.
  Gathered gather(const GroupSettings& settings);
  // The ranks of this rank's host, under the name of that rendezvous.
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
